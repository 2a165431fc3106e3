"""The active-time budget of a Session: a cancel scope whose deadline is moved, and no timer task."""

from __future__ import annotations

import math

import trio


class ActiveBudget:
    """Seconds of active time that a block may spend.

    Enter `scope` around the work; `resume` starts the clock, `pause` stops it. Both are plain functions, so that a
    pause and the shutting of a gate happen without a checkpoint in between. It starts paused.
    """

    def __init__(self, seconds: float) -> None:
        self.scope = trio.CancelScope()
        self._remaining_s = seconds
        self._resumed_at: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether time is being spent."""
        return self._resumed_at is not None

    @property
    def remaining_s(self) -> float:
        """Active seconds left, never negative."""
        spent = 0.0 if self._resumed_at is None else trio.current_time() - self._resumed_at
        return max(0.0, self._remaining_s - spent)

    @property
    def is_spent(self) -> bool:
        """Whether the deadline ended the block."""
        return self.scope.cancelled_caught

    def resume(self) -> None:
        """Start spending; nothing happens when it already runs."""
        if self._resumed_at is None:
            self._resumed_at = trio.current_time()
            self.scope.deadline = self._resumed_at + self._remaining_s

    def pause(self) -> None:
        """Stop spending; nothing happens when it is paused."""
        if self._resumed_at is not None:
            self._remaining_s = self.remaining_s
            self._resumed_at = None
            self.scope.deadline = math.inf
