"""A progress bar per step: finished Sessions, `scored=`, `prepared=`.

On a terminal it is a tqdm bar; elsewhere plain lines at intervals. Starts no thread. Not covered: events (log.py).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from attrs import define, field
from tqdm import tqdm


class StepBar(Protocol):
    """What a step tells about its progress."""

    def update(self, *, finished: int | None = None, scored: int | None = None, prepared: int | None = None) -> None:
        """Show the counts so far: Sessions finished, Groups scored, Groups prepared for a lease; None: as before."""
        ...


class _Tqdm(tqdm):  # type: ignore[type-arg]  # generic in its stubs only, not at run time
    """A tqdm without its monitor thread and without the process-wide lock it would make."""

    monitor_interval = 0
    _lock = threading.RLock()


@contextmanager
def step_progress(
    rollout_id: int,
    total_sessions: int,
    *,
    stream: TextIO | None = None,
    interval_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[StepBar]:
    """Show the progress of one step for the length of the block.

    Args:
      total_sessions: Sessions that the step trains on; more may finish, when Groups are dropped.
      stream: standard error by default.
      interval_s: the least time between two plain lines.
      clock: seconds for the intervals of plain lines.
    """
    out = sys.stderr if stream is None else stream
    if not out.isatty():
        lines = _PlainLines(rollout_id, total_sessions, out, interval_s, clock)
        try:
            yield lines
        finally:
            lines.close()
        return
    bar = _Tqdm(
        total=total_sessions, desc=f"step {rollout_id}", unit="session", file=out, dynamic_ncols=True, leave=True
    )
    try:
        yield _TerminalBar(bar)
    finally:
        bar.close()


def write_above_bar(text: str, stream: TextIO) -> None:
    """Write a line to a terminal without tearing the bar that may stand at its bottom."""
    _Tqdm.write(text, file=stream)


@define(eq=False)
class _TerminalBar:
    _bar: _Tqdm
    _counts: dict[str, int] = field(factory=lambda: {"scored": 0, "prepared": 0})

    def update(self, *, finished: int | None = None, scored: int | None = None, prepared: int | None = None) -> None:
        given = {"scored": scored, "prepared": prepared}
        counts = self._counts | {name: count for name, count in given.items() if count is not None}
        if counts != self._counts:
            self._counts = counts
            self._bar.set_postfix(counts, refresh=False)
        if finished is not None:
            self._bar.n = finished
            if self._bar.total is not None and finished > self._bar.total:
                self._bar.total = finished
        self._bar.refresh()


@define(eq=False)
class _PlainLines:
    _rollout_id: int
    _total: int
    _stream: TextIO
    _interval_s: float
    _clock: Callable[[], float]
    _counts: dict[str, int] = field(factory=lambda: {"finished": 0, "scored": 0, "prepared": 0})
    _last_s: float = field(init=False)
    _shown: str = ""

    def __attrs_post_init__(self) -> None:
        self._last_s = self._clock()

    def update(self, *, finished: int | None = None, scored: int | None = None, prepared: int | None = None) -> None:
        given = {"finished": finished, "scored": scored, "prepared": prepared}
        self._counts |= {name: count for name, count in given.items() if count is not None}
        if self._clock() - self._last_s >= self._interval_s:
            self._print()

    def close(self) -> None:
        """Say the last word, if it was not said."""
        self._print()

    def _print(self) -> None:
        self._last_s = self._clock()
        counts = self._counts
        total = max(self._total, counts["finished"])
        line = (
            f"step {self._rollout_id}: {counts['finished']}/{total} sessions, "
            f"scored={counts['scored']}, prepared={counts['prepared']}"
        )
        if line != self._shown:
            self._shown = line
            try:
                print(line, file=self._stream, flush=True)
            except OSError:
                pass  # nobody reads along any more; the run goes on
