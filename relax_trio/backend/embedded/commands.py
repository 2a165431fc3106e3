"""What the Trio side tells the engine thread, and what comes back. Plain data: no torch, no waiting."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from threading import Lock

from attrs import define, field, frozen
from outcome import Outcome

from relax_trio.backend.base import Attempt, AttemptResult, WeightSource
from relax_trio.ids import WeightVersion


@define(eq=False, kw_only=True)
class Job:
    """An attempt on its way through the engine.

    Attributes:
      attempt: as given.
      seed: 64 bits that its tokens are drawn with: the attempt's own, or a random one.
      result: set once on the Trio side.
    """

    attempt: Attempt
    seed: int
    result: Outcome[AttemptResult] | None = None
    wake: Callable[[], None]

    def empty_result(self) -> AttemptResult:
        """What an attempt has that was aborted before it ran."""
        return AttemptResult(token_ids=array("i"), logprobs=array("d"), finish="abort", versions=())


@define(eq=False, kw_only=True)
class Update:
    """New weights. `claim` decides once whether they are applied or were withdrawn before their turn came.

    Attributes:
      result: set once on the Trio side.
    """

    version: WeightVersion
    source: WeightSource
    result: Outcome[None] | None = None
    wake: Callable[[], None]
    _lock: Lock = field(factory=Lock, init=False)
    _claimed: bool = field(default=False, init=False)

    def claim(self) -> bool:
        """True for the first caller, from whichever thread."""
        with self._lock:
            first = not self._claimed
            self._claimed = True
        return first


@frozen
class Submit:
    """Take an attempt."""

    job: Job


@frozen
class Abort:
    """Give back what the attempt has; nothing happens if it has ended."""

    job: Job


@frozen
class CloseSession:
    """The Session's cached prefixes may go."""

    session_key: str


@frozen
class Stop:
    """Leave the loop."""


Command = Submit | Abort | Update | CloseSession | Stop

Finished = tuple[Job, Outcome[AttemptResult]] | tuple[Update, Outcome[None]]
"""A command of the Trio side and its outcome, on the way back."""
