"""The reward curve: drawn with text for the terminal, and as a PNG.

Values are one per step; None and numbers that are not finite are gaps. Draws into objects of its own: no global figure,
no colour needed to read the text. Not covered: where the values come from (metrics.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from attrs import frozen

Values: TypeAlias = "Sequence[float | None]"
Axes: TypeAlias = Any  # matplotlib.axes.Axes, which is loaded only when something is drawn

MIN_WIDTH, MIN_HEIGHT = 30, 6
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bit of a dot by column (0, 1) and row (0 … 3)
_INK, _MUTED, _ACCENT = "#1f2933", "#7b8794", "#2563eb"
MAX_MARKED_STEPS = 60
"""Points of longer curves are not marked in the PNG."""

_CONTROL_MARK, _CURVE_MARK = "·", "⣤"


@frozen
class _Frame:
    """Value range and step range of a plot."""

    low: float
    high: float
    tick: float
    n_steps: int

    def at(self, step: float, value: float) -> tuple[float, float]:
        """Position from 0 to 1, from the left and from the top."""
        return step / max(1, self.n_steps - 1), (self.high - value) / (self.high - self.low)


def draw_curve_text(
    values: Values, *, title: str, width: int = 80, height: int = 16, control: Values | None = None
) -> str:
    """Draw a curve with braille dots inside a frame.

    Args:
      title: a line above it; cut to the width.
      width, height: columns and lines of the whole drawing, at least 30 and 6.
      control: a second curve to compare with, drawn as `·`.

    Returns:
      Lines of at most `width` columns, `height` in all, without a newline at the end and without escape codes.
    """
    width, height = max(width, MIN_WIDTH), max(height, MIN_HEIGHT)
    known = _known(values)
    if not known:
        return f"{_cut(title, width)}\n(no values yet)"
    frame = _frame(values, control)
    n_rows = height - 4
    labels = _labels(frame, n_rows)
    margin = max(len(text) for text in labels)
    n_columns = width - margin - 3
    canvas = [[" "] * n_columns for _ in range(n_rows)]
    if control is not None:
        _draw_marks(canvas, frame, _known(control))
    _draw_line(canvas, frame, values)
    lines = [_cut(title, width)]
    lines += [f"{label:>{margin}} ┤{''.join(row)}".rstrip() for label, row in zip(labels, canvas, strict=True)]
    lines.append(f"{' ' * margin} └{'─' * n_columns}")
    lines.append(f"{' ' * (margin + 2)}{_step_axis(frame, n_columns)}".rstrip())
    lines.append(_cut(_legend(known, control), width))
    return "\n".join(lines)


def draw_curve_png(
    path: Path, values: Values, *, title: str, control: Values | None = None, ylabel: str = "mean reward"
) -> None:
    """Draw a curve into a PNG file, atomically. Blocking: the first call loads matplotlib.

    Raises:
      OSError: the file can't be written.
    """
    # Loading takes a second, and most commands draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _furnish(axes, title, ylabel)
    known, still = _known(values), _known(control or ())
    if known:
        frame = _frame(values, control)
        axes.set_ylim(frame.low, frame.high + 0.04 * (frame.high - frame.low))
        if still:
            axes.plot(
                *zip(*still, strict=True), color=_MUTED, linewidth=1.5, linestyle=(0, (4, 3)), label="learning rate 0"
            )
        _plot_curve(axes, values, frame.low)
        _annotate_ends(axes, known)
    else:
        axes.text(0.5, 0.5, "no values yet", transform=axes.transAxes, ha="center", va="center", color=_MUTED)
    if known and still:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, labelcolor=_INK)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)


def _furnish(axes: Axes, title: str, ylabel: str) -> None:
    """Title, labels, a light grid, and nothing else around the curve."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", color=_INK, fontsize=13, fontweight="bold", pad=12)
    axes.set_xlabel("step", color=_MUTED)
    axes.set_ylabel(ylabel, color=_MUTED)
    axes.grid(visible=True, color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#cbd2d9")
    axes.tick_params(colors=_MUTED, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.04)


def _plot_curve(axes: Axes, values: Values, low: float) -> None:
    series = [math.nan if value is None or not math.isfinite(value) else value for value in values]
    steps = range(len(series))
    marker_size = 4.5 if len(series) <= MAX_MARKED_STEPS else 0.0
    axes.plot(steps, series, color=_ACCENT, linewidth=2.2, marker="o", markersize=marker_size, label="run")
    axes.fill_between(steps, series, low, color=_ACCENT, alpha=0.07, linewidth=0)


def _annotate_ends(axes: Axes, known: list[tuple[int, float]]) -> None:
    """Write the first value over its point and the last one right of its point, where no line can cross it."""
    places = {known[0]: ((0, 9), "center", "bottom"), known[-1]: ((7, 0), "left", "center")}
    for (step, value), (offset, horizontal, vertical) in places.items():
        axes.annotate(
            f"{value:.2f}",
            (step, value),
            xytext=offset,
            textcoords="offset points",
            ha=horizontal,
            va=vertical,
            color=_ACCENT,
            fontsize=10,
            fontweight="bold",
            annotation_clip=False,
        )


def _known(values: Values) -> list[tuple[int, float]]:
    return [(step, float(v)) for step, v in enumerate(values) if v is not None and math.isfinite(v)]


def _frame(values: Values, control: Values | None) -> _Frame:
    """Whole ticks around all values, a few of them: steps of 1, 2 or 5 times a power of ten."""
    numbers = [value for _, value in _known(values) + _known(control or ())]
    low, high = min(numbers), max(numbers)
    if high - low < 1e-9 * max(1.0, abs(high)):
        pad = 0.5 * max(abs(high), 1.0)
        low, high = low - pad, high + pad
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    tick = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    low, high = math.floor(low / tick + 1e-9) * tick, math.ceil(high / tick - 1e-9) * tick
    return _Frame(low, high, tick, max(len(values), len(control or ())))


def _labels(frame: _Frame, n_rows: int) -> list[str]:
    """The label of each row: its tick, where the row is the nearest to one."""
    n_digits = max(0, -math.floor(math.log10(frame.tick)))
    labels = [""] * n_rows
    for i in range(round((frame.high - frame.low) / frame.tick) + 1):
        value = frame.low + i * frame.tick
        labels[round(frame.at(0, value)[1] * (n_rows - 1))] = f"{value:.{n_digits}f}"
    return labels


def _draw_marks(canvas: list[list[str]], frame: _Frame, points: list[tuple[int, float]]) -> None:
    n_rows, n_columns = len(canvas), len(canvas[0])
    for column in range(n_columns):
        value = _interpolate(points, column / max(1, n_columns - 1) * max(0, frame.n_steps - 1))
        if value is not None:
            _, y = frame.at(0, value)
            canvas[round(y * (n_rows - 1))][column] = _CONTROL_MARK


def _draw_line(canvas: list[list[str]], frame: _Frame, values: Values) -> None:
    """Join neighbouring values by dots; a gap joins nothing; a lone value is one dot."""
    n_x, n_y = 2 * len(canvas[0]) - 1, 4 * len(canvas) - 1
    bits: dict[tuple[int, int], int] = {}

    def dot(x: int, y: int) -> None:
        cell = (y // 4, x // 2)
        bits[cell] = bits.get(cell, 0) | _DOTS[x % 2][y % 4]

    previous: tuple[int, float, float] | None = None
    for step, value in _known(values):
        x, y = (part * n for part, n in zip(frame.at(step, value), (n_x, n_y), strict=True))
        dot(round(x), round(y))
        if previous is not None and previous[0] == step - 1:
            _, from_x, from_y = previous
            n = max(1, math.ceil(max(abs(x - from_x), abs(y - from_y))))
            for i in range(n):
                dot(round(from_x + (x - from_x) * i / n), round(from_y + (y - from_y) * i / n))
        previous = (step, x, y)
    for (row, column), mask in bits.items():
        canvas[row][column] = chr(_BRAILLE + mask)


def _interpolate(points: list[tuple[int, float]], step: float) -> float | None:
    """Value at `step` between the points around it, None outside them."""
    for (left, a), (right, b) in pairwise(points):
        if left <= step <= right:
            return a + (b - a) * (step - left) / (right - left)
    return points[0][1] if len(points) == 1 and points[0][0] == round(step) else None


def _step_axis(frame: _Frame, n_columns: int) -> str:
    last = str(frame.n_steps - 1)
    if frame.n_steps == 1:
        return "0"
    middle = f"{(frame.n_steps - 1) / 2:g}" if (frame.n_steps - 1) % 2 == 0 else ""
    left = "0" + " " * n_columns
    if middle and n_columns > 20:
        at = n_columns // 2 - len(middle) // 2
        left = left[:at] + middle + left[at + len(middle) :]
    return left[: n_columns - len(last)] + last


def _legend(known: list[tuple[int, float]], control: Values | None) -> str:
    (first, start), (last, end) = known[0], known[-1]
    text = f"{_CURVE_MARK} step {first}: {start:.3g}"
    if last != first:
        text += f" → step {last}: {end:.3g}"
    if control is not None:
        text += f"   {_CONTROL_MARK} learning rate 0"
    return text


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
