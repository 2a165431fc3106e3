"""Which prepared answer an attempt continues: shared by the backends that don't compute.

A turn that was interrupted, by an abort or because its caller went away, goes on with the answer it had begun; every
other attempt begins a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from relax_trio.backend.base import Attempt

A = TypeVar("A")


class InterruptedTurns(Generic[A]):
    """Answers of turns that were interrupted, found by Session and the tokens that the turn began with."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, bytes], A] = {}

    @property
    def session_keys(self) -> frozenset[str]:
        """Sessions that have an interrupted turn."""
        return frozenset(session_key for session_key, _ in self._answers)

    def take(self, attempt: Attempt, begin: Callable[[], A]) -> A:
        """The answer that `attempt` goes on with, or a new one."""
        key = _key(attempt)
        return self._answers.pop(key) if key in self._answers else begin()

    def put_back(self, attempt: Attempt, answer: A) -> None:
        """The attempt ended before its answer did."""
        self._answers[_key(attempt)] = answer

    def close_session(self, session_key: str) -> None:
        """Forget the Session."""
        for key in [key for key in self._answers if key[0] == session_key]:
            del self._answers[key]


def _key(attempt: Attempt) -> tuple[str, bytes]:
    return attempt.session_key, attempt.token_ids[: attempt.response_start].tobytes()
