"""The accounting window of one rollout step. A plain ledger: it starts nothing and waits for nothing."""

from __future__ import annotations

import trio
from attrs import define, field, frozen

from relax_trio.data.sample import Sample
from relax_trio.errors import RelaxTrioError
from relax_trio.ids import GroupId
from relax_trio.runtime.outcome import SessionReport


@frozen(kw_only=True)
class ScoredGroup:
    """A complete Group with rewards and credit, ready for transfer."""

    id: GroupId
    number: int
    samples: tuple[Sample, ...]
    reports: tuple[SessionReport, ...]


@frozen(kw_only=True)
class StepResult:
    """What a closed step hands to transfer.

    Attributes:
      groups: exactly `target` scored Groups, in order of their numbers.
      seconds: from open to close, on the Trio clock.
    """

    rollout_id: int
    groups: tuple[ScoredGroup, ...]
    n_dropped: int
    n_failed_sessions: int
    n_set_aside_rows: int
    seconds: float

    @property
    def samples(self) -> list[Sample]:
        """All training rows, in order of Group, place and export."""
        return [sample for group in self.groups for sample in group.samples]


@define(eq=False, kw_only=True)
class Step:
    """One open step.

    Attributes:
      target: Groups it needs (its debt at opening).
      n_work: Groups at work at once, at least `target`.
      n_alive: Groups at work, reward included.
      closed: set when the debt is 0, or when the step failed.
    """

    rollout_id: int
    target: int
    n_work: int
    n_alive: int = 0
    n_dropped: int = 0
    n_failed_sessions: int = 0
    closed: trio.Event = field(factory=trio.Event)
    failure: RelaxTrioError | None = None
    _scored: list[ScoredGroup] = field(factory=list)
    _opened_s: float = field(factory=trio.current_time)

    @property
    def n_scored(self) -> int:
        """Groups that paid."""
        return len(self._scored)

    @property
    def debt(self) -> int:
        """Scored Groups still to come."""
        return self.target - len(self._scored)

    @property
    def demand(self) -> int:
        """Groups to start now, so that `n_work` are at work or have paid."""
        if self.closed.is_set():
            return 0
        return max(0, self.n_work - self.n_alive - len(self._scored))

    @property
    def age_s(self) -> float:
        """Seconds since it was opened."""
        return trio.current_time() - self._opened_s

    def pay(self, group: ScoredGroup) -> bool:
        """Count a scored Group; False when the step has what it needs already (surplus)."""
        if self.closed.is_set():
            return False
        self._scored.append(group)
        if self.debt == 0:
            self.closed.set()
        return True

    def fail(self, error: RelaxTrioError) -> None:
        """The step can't go on; the first error stands."""
        if self.failure is None and not self.closed.is_set():
            self.failure = error
            self.closed.set()

    def result(self, n_set_aside_rows: int) -> StepResult:
        """What the closed step yields.

        Args:
          n_set_aside_rows: rows of the run that are not tried any more.

        Raises:
          RelaxTrioError: the step's failure.
        """
        if self.failure is not None:
            raise self.failure
        assert self.debt == 0, "a step closes when its debt is 0"
        return StepResult(
            rollout_id=self.rollout_id,
            groups=tuple(sorted(self._scored, key=lambda group: group.number)),
            n_dropped=self.n_dropped,
            n_failed_sessions=self.n_failed_sessions,
            n_set_aside_rows=n_set_aside_rows,
            seconds=self.age_s,
        )
