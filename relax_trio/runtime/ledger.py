"""Partitions and who pays for them. Plain and synchronous: nothing here waits.

A partition `train_N` opens with a debt of Groups. A scored Group pays the oldest debt; what nobody owes any more is
surplus, which waits for the next partition where Groups are retained and is refused where they aren't.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import trio
from attrs import define, field, frozen

from relax_trio.data.sample import Sample
from relax_trio.data.task import TaskInput
from relax_trio.ids import GroupId
from relax_trio.runtime.outcome import SessionReport

MAX_OPEN_PARTITIONS = 2


@frozen(kw_only=True)
class ScoredGroup:
    """A complete Group with rewards and credit, ready for transfer."""

    id: GroupId
    number: int
    task: TaskInput
    samples: tuple[Sample, ...]
    reports: tuple[SessionReport, ...]

    @property
    def oldest_version(self) -> int:
        """Number of the weights that served when its oldest turn was dispatched."""
        return min(int(report.oldest_version) for report in self.reports)


@define(eq=False, kw_only=True)
class Partition:
    """The training data of one step.

    Attributes:
      target: Groups it needs.
      groups: those that paid, in the order of scoring.
      seconds: how long its step was open.
      grown: set when a Group pays, and replaced then.
    """

    rollout_id: int
    target: int
    groups: list[ScoredGroup] = field(factory=list)
    seconds: float = 0.0
    grown: trio.Event = field(factory=trio.Event)

    @property
    def name(self) -> str:
        """Its name in logs and events."""
        return f"train_{self.rollout_id}"

    @property
    def debt(self) -> int:
        """Groups still to come."""
        return max(0, self.target - len(self.groups))

    def add(self, group: ScoredGroup) -> None:
        """Take a scored Group."""
        self.groups.append(group)
        grown, self.grown = self.grown, trio.Event()
        grown.set()


@define(eq=False, kw_only=True)
class Ledger:
    """The open partitions of a run, at most two, and the surplus.

    Attributes:
      retains: whether surplus waits for the next partition.
      surplus: scored Groups that nobody owes, in the order of scoring.
    """

    retains: bool
    surplus: deque[ScoredGroup] = field(factory=deque)
    _open: list[Partition] = field(factory=list)

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The open ones, older first."""
        return tuple(self._open)

    @property
    def debt(self) -> int:
        """Groups that the open partitions still need."""
        return sum(partition.debt for partition in self._open)

    def tasks(self, other_than: Partition | None = None) -> list[TaskInput]:
        """Rows of all Groups that are scored and not handed over for good, those of one partition left out."""
        open_ones = [partition for partition in self._open if partition is not other_than]
        groups = [group for partition in open_ones for group in partition.groups]
        return [group.task for group in (*groups, *self.surplus)]

    def open(self, rollout_id: int, target: int) -> Partition:
        """Open the partition of a step; surplus pays first, in its order."""
        assert len(self._open) < MAX_OPEN_PARTITIONS, "at most two partitions are open"
        partition = Partition(rollout_id=rollout_id, target=target)
        self._open.append(partition)
        self._pay_from_surplus()
        return partition

    def pay(self, group: ScoredGroup) -> bool:
        """Let a scored Group pay the oldest debt; False when it is neither owed nor kept."""
        for partition in self._open:
            if partition.debt:
                partition.add(group)
                return True
        if self.retains:
            self.surplus.append(group)
        return self.retains

    def strike(self, partition: Partition, group: ScoredGroup) -> None:
        """Take a Group out of a partition again: what it paid is owed once more; surplus pays first."""
        partition.groups.remove(group)
        self._pay_from_surplus()

    def _pay_from_surplus(self) -> None:
        while self.surplus and self.debt:
            self.pay(self.surplus.popleft())

    def fill_up(self, partition: Partition, *, multiple_of: int) -> int:
        """Let surplus join a paid partition, in its order, as far as its rows stay a multiple of `multiple_of`.

        Returns:
          How many Groups joined.
        """
        n_rows, fitting = _n_rows(partition.groups), 0
        for count, group in enumerate(self.surplus, start=1):
            n_rows += len(group.samples)
            if n_rows % multiple_of == 0:
                fitting = count
        for _ in range(fitting):
            partition.add(self.surplus.popleft())
        return fitting

    def seal(self, partition: Partition) -> None:
        """The partition is handed over for good."""
        self._open.remove(partition)


def _n_rows(groups: Iterable[ScoredGroup]) -> int:
    return sum(len(group.samples) for group in groups)
