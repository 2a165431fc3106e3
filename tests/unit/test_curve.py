"""The reward curve as text and as PNG."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_trio.observe.curve import draw_curve_png, draw_curve_text

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

series = st.lists(st.none() | st.floats(-1e9, 1e9) | st.just(math.nan), min_size=1, max_size=120)


def braille_rows(drawing):
    """Plot row of every dotted column, from left to right."""
    rows = [line.partition("┤")[2] for line in drawing.splitlines() if "┤" in line]
    width = max(map(len, rows))
    columns = []
    for x in range(width):
        hits = [y for y, row in enumerate(rows) if x < len(row) and 0x2801 <= ord(row[x]) <= 0x28FF]
        if hits:
            columns.append(sum(hits) / len(hits))
    return columns


def test_a_rising_curve_rises_on_the_page():
    drawing = draw_curve_text([i / 20 for i in range(20)], title="Mean reward", width=60, height=14)

    lines = drawing.splitlines()
    heights = braille_rows(drawing)
    assert lines[0] == "Mean reward"
    assert heights == sorted(heights, reverse=True)
    assert (heights[0], heights[-1]) == (9, 0)
    assert lines[-1] == "⣤ step 0: 0 → step 19: 0.95"
    assert lines[-2].split() == ["0", "19"]


def test_labels_stand_at_round_values_around_the_curve():
    drawing = draw_curve_text([0.41, 0.87], title="t", width=60, height=16)

    labels = re.findall(r"^ *([\d.]+) ┤", drawing, re.MULTILINE)
    assert labels == ["1.0", "0.8", "0.6", "0.4"]


def test_a_control_is_told_apart_without_colour():
    drawing = draw_curve_text([0.4, 0.9], title="t", control=[0.4, 0.4])

    assert drawing.count("·") > 20
    assert "· learning rate 0" in drawing
    assert "\x1b" not in drawing
    assert "·" not in draw_curve_text([0.4, 0.9], title="t")


def test_a_gap_is_left_open():
    whole = draw_curve_text([0.0] * 9, title="t")
    gap = draw_curve_text([0.0] * 4 + [None] + [0.0] * 4, title="t")

    n_gone = len(braille_rows(whole)) - len(braille_rows(gap))
    assert 15 <= n_gone <= 20  # two of eight joints, on about 74 columns


@pytest.mark.parametrize("values", [[], [None], [math.nan, math.inf]])
def test_no_values_are_said_so(values, tmp_path):
    assert draw_curve_text(values, title="Mean reward") == "Mean reward\n(no values yet)"

    draw_curve_png(tmp_path / "c.png", values, title="Mean reward")
    assert (tmp_path / "c.png").stat().st_size > 1000


@unhurried
@given(series, st.none() | series, st.integers(1, 200), st.integers(1, 60))
def test_a_drawing_fits_its_page(values, control, width, height):
    drawing = draw_curve_text(values, title="A title that is rather long", width=width, height=height, control=control)

    lines = drawing.splitlines()
    assert len(lines) in (2, max(height, 6))
    assert max(map(len, lines)) <= max(width, 30)


def test_a_png_is_written_whole_and_leaves_pyplot_alone(tmp_path):
    import sys

    path = tmp_path / "reward.png"
    had_pyplot = "matplotlib.pyplot" in sys.modules
    draw_curve_png(path, [0.4, None, 0.5, 0.9], title="Mean reward", control=[0.4, 0.4, 0.41, 0.4])

    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    assert [p.name for p in tmp_path.iterdir()] == ["reward.png"]
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def test_a_png_shows_the_curve_in_its_colour(tmp_path):
    from matplotlib.image import imread

    path = tmp_path / "reward.png"
    draw_curve_png(path, [0.1, 0.9], title="Mean reward")

    pixels = imread(path)[..., :3]
    blue = abs(pixels - [0x25 / 255, 0x63 / 255, 0xEB / 255]).max(axis=2) < 0.05
    rows = blue.argmax(axis=0)[blue.any(axis=0)]
    n = len(rows)
    assert n > 500
    assert rows[n // 4] > rows[n // 2] > rows[3 * n // 4]
