"""Rollout that goes on while training does: windows that open and close over Groups that stay (fully async).

A window opens the partition of one step. It closes when nothing is owed any more, or, at a change of weights, on
credit: when at least as many Groups are interrupted as are owed. What is owed then stays with its partition and is paid
first in the next window. At most two partitions are open, so rollout is never more than one step ahead of training.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import groupby

import trio
from attrs import define, field

from relax_trio.data.sample import Sample
from relax_trio.events import emit
from relax_trio.runtime.ledger import MAX_OPEN_PARTITIONS, Partition, ScoredGroup
from relax_trio.runtime.step import Step, StepResult
from relax_trio.runtime.work import Work
from relax_trio.sync.gate import Gate


@define(eq=False, kw_only=True)
class Overlap:
    """The rollout side of a fully async run, and what its trainer takes from it.

    Attributes:
      work: open.
      max_staleness: see `Transfer`.
    """

    work: Work
    max_staleness: int | None = None
    _partitions: dict[int, Partition] = field(factory=dict)
    _opened: dict[int, trio.Event] = field(factory=dict)
    _room: Gate = field(factory=Gate)
    _drained: Gate = field(factory=Gate)

    async def run(self, first_step: int, n_steps: int) -> None:
        """Open a window for every step, then pay what is still owed; returns when every partition is sealed.

        Raises:
          RelaxTrioError: the run's failure, whenever it comes; in a group.

        Cancellation: leaves the windows; the work block that is left then ends every Group.
        """
        async with self.work.watching():  # Groups are at work between windows too
            for rollout_id in range(first_step, n_steps):
                await self._until(self._room.wait_open)
                await self._run_window(rollout_id)
            await self._backfill(n_steps)

    async def wait_partition(self, rollout_id: int) -> Partition:
        """The partition of a step, once its window is open. Cancellation: safe."""
        await self._opened.setdefault(rollout_id, trio.Event()).wait()
        return self._partitions[rollout_id]

    def transfer(self, partition: Partition, *, batch_sessions: int) -> Transfer:
        """What a trainer takes the partition's rows by, those of `batch_sessions` Sessions at a time."""
        return Transfer(
            overlap=self, partition=partition, batch_sessions=batch_sessions, max_staleness=self.max_staleness
        )

    def seal(self, partition: Partition) -> StepResult:
        """The partition was trained on; its Groups in the order of scoring."""
        self.work.ledger.seal(partition)
        self._update()
        return self.work.result(partition.rollout_id, partition.groups, partition.seconds)

    async def change_weights(self, change: Callable[[], Awaitable[None]]) -> None:
        """Run `change` while no attempt runs; the open window may close on credit.

        Cancellation: as `change`; attempts stay parked.
        """
        await self.work.park("new weights")
        self._close_on_credit()
        await change()
        self.work.unpark()

    # --- windows ------------------------------------------------------------------------------------------------

    async def _run_window(self, rollout_id: int) -> None:
        work = self.work
        work.plan(rollout_id)
        partition = work.ledger.open(rollout_id, work.config.rollout_batch_size)
        self._partitions[rollout_id] = partition
        self._opened.setdefault(rollout_id, trio.Event()).set()
        self._update()
        step = Step(rollout_id=rollout_id, partition=partition)
        await self._pass(step)
        partition.seconds = step.age_s

    async def _backfill(self, rollout_id: int) -> None:
        """Pay what is owed without opening a partition and without oversampling, until everything is trained on."""
        residents = self.work.residents
        residents.margin = residents.next_work = 0
        if self.work.ledger.debt:
            await self._pass(Step(rollout_id=rollout_id, partition=None))
        await self._until(self._drained.wait_open)
        await residents.drop(residents.all, "the last step closed")

    async def _pass(self, step: Step) -> None:
        """Let a window pass."""
        residents = self.work.residents
        async with self.work.accounting(step):
            residents.step = step
            residents.update()
            await step.closed.wait()
        residents.step = None

    def _close_on_credit(self) -> None:
        """Close the open window if every Group that is owed may be one of those that are interrupted."""
        residents, owed = self.work.residents, self.work.ledger.debt
        step = residents.step
        if step is None or step.partition is None or step.closed.is_set():
            return
        n_interrupted = sum(1 for resident in residents.leased if resident.group.is_interrupted)
        if 0 < owed <= n_interrupted:
            emit("step.credited", rollout=step.rollout_id, debt=owed, interrupted=n_interrupted)
            step.closed.set()

    # --- waiting ------------------------------------------------------------------------------------------------

    def _update(self) -> None:
        n_open = len(self.work.ledger.partitions)
        if n_open < MAX_OPEN_PARTITIONS:
            self._room.open()
        else:
            self._room.shut("two partitions are open")
        if n_open:
            self._drained.shut("a partition is open")
        else:
            self._drained.open()

    async def _until(self, wait: Callable[[], Awaitable[None]]) -> None:
        """Wait, but not past the run's failure."""
        residents = self.work.residents
        await residents.unless_failed(wait)
        if residents.failure is not None:
            raise residents.failure


@define(eq=False, kw_only=True)
class Transfer:
    """Rows of a partition on their way to the trainer, as they come. The contexts of a Session stay together.

    Attributes:
      batch_sessions: Sessions of a batch; the last one may have fewer.
      max_staleness: most versions between the weights that are trained and those that served when the oldest turn of a
        Group was dispatched; time in queues counts, because it is looked at when the Group is taken. None: no limit.
    """

    overlap: Overlap
    partition: Partition
    batch_sessions: int
    max_staleness: int | None
    _sessions: list[list[Sample]] = field(factory=list)
    _n_taken: int = 0

    async def next_batch(self, version: int) -> list[Sample] | None:
        """The next rows; None when the partition is paid and all of it was taken.

        Args:
          version: number of the weights that will be trained.

        Cancellation: safe; no row is lost.
        """
        while len(self._sessions) < self.batch_sessions:
            if self._n_taken < len(self.partition.groups):
                self._take(self.partition.groups[self._n_taken], version)
            elif self.partition.debt:
                await self.partition.grown.wait()
            else:
                break
        batch, self._sessions = self._sessions[: self.batch_sessions], self._sessions[self.batch_sessions :]
        return [sample for rows in batch for sample in rows] or None

    def _take(self, group: ScoredGroup, version: int) -> None:
        staleness = version - group.oldest_version
        if self.max_staleness is None or staleness <= self.max_staleness:
            self._sessions += [list(rows) for _, rows in groupby(group.samples, key=lambda sample: sample.index)]
            self._n_taken += 1
            return
        work = self.overlap.work
        work.ledger.strike(self.partition, group)
        work.rows.give_back(group.task)
        work.residents.tally.n_dropped += 1
        work.residents.tally.n_stale += 1
        emit("group.dropped", group=group.id, reason=f"its oldest turn is {staleness} versions old (--max-staleness)")
        work.residents.update()
