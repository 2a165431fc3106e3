"""Clean-up that must reach outside although its scope is cancelled: shielded, and always bounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from relax_trio.events import emit

MAX_CLEANUP_S = 30.0


@contextmanager
def cleanup_scope(seconds: float, what: str) -> Iterator[trio.CancelScope]:
    """Shield the block from outer cancellation for at most `seconds`.

    What could not be done in time is told as event `cleanup.timed_out`; the block is then cancelled and left.

    Args:
      seconds: bound, more than 0 and at most `MAX_CLEANUP_S`.
      what: what is cleaned up, with its id.
    """
    if not 0 < seconds <= MAX_CLEANUP_S:
        raise ValueError(f"a clean-up takes more than 0 and at most {MAX_CLEANUP_S} s, not {seconds}")
    with trio.move_on_after(seconds, shield=True) as scope:
        yield scope
    if scope.cancelled_caught:
        emit("cleanup.timed_out", what=what, seconds=seconds)
