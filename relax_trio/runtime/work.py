"""The work of a run: rollout steps over the resident Groups.

A step is an accounting window, not an owner. At its close, what is unfinished is dropped, or kept where the run
retains Groups (partial rollout): its attempts are aborted and its requests parked, or attempts are paused in the
backend. Where training overlaps rollout (fully async), nothing happens at a close: overlap.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio
from attrs import define, field

from relax_trio.config.tree import RolloutConfig
from relax_trio.data.rows import RowStream
from relax_trio.data.task import TaskInput
from relax_trio.events import emit
from relax_trio.reward.reward import RewardScorer
from relax_trio.runtime.kv_metrics import KvTally
from relax_trio.runtime.ledger import Ledger, Partition, ScoredGroup
from relax_trio.runtime.pause import Pause
from relax_trio.runtime.residents import Resident, Residents
from relax_trio.runtime.session import Session
from relax_trio.runtime.shared import Shared, TurnLimits
from relax_trio.runtime.stall import Wait, long_waits, watch_stalls
from relax_trio.runtime.step import Step, StepResult, Tally


@define(eq=False, kw_only=True)
class Work:
    """The steps of a run and their Groups.

    Attributes:
      rows: where Groups take their rows from and return them to.
      next_group, row_failures, assigns_credit: see `Residents`; what the run begins with.
      heartbeat_s: a step tells at these intervals that it is open, and of waits that are longer.
      n_steps: steps of the whole run; nothing is prepared past the last one.
      data_parallel_size: rows of a partition that closes dynamically are a multiple of it.
    """

    shared: Shared
    config: RolloutConfig
    limits: TurnLimits
    rows: RowStream
    scorer: RewardScorer
    next_group: int = 0
    row_failures: Counter[int] = field(factory=Counter)
    assigns_credit: bool = True
    heartbeat_s: float = 60.0
    n_steps: int | None = None
    data_parallel_size: int = 1
    kv_tally: KvTally = field(factory=KvTally, init=False)
    ledger: Ledger = field(init=False)
    residents: Residents = field(init=False)
    _pause: Pause = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._pause = Pause(self.shared.backend)
        self.ledger = Ledger(retains=self.config.retains_groups)
        self.residents = Residents(
            shared=self.shared,
            config=self.config,
            limits=self.limits,
            rows=self.rows,
            scorer=self.scorer,
            ledger=self.ledger,
            next_group=self.next_group,
            row_failures=self.row_failures,
            assigns_credit=self.assigns_credit,
        )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Own Groups for the length of the block; on leaving, every Group is ended and its row accounted for.

        A pause ends before them: an attempt that ends is aborted, which a paused engine may not hear.
        """
        try:
            async with self.residents.open(), self._pause.open():
                yield
        finally:
            for task in self.ledger.tasks():
                self.rows.give_back(task)

    def unfinished(self, trained: Partition | None = None) -> list[TaskInput]:
        """Rows that are taken and not done: of resident Groups, of surplus, of open partitions other than `trained`."""
        return [*(resident.group.task for resident in self.residents.all), *self.ledger.tasks(trained)]

    # --- a step -----------------------------------------------------------------------------------------------

    async def run_step(self, rollout_id: int, *, may_pause: bool = False) -> StepResult:
        """Run one rollout step: exactly `rollout_batch_size` scored Groups, more where it closes dynamically.

        Args:
          may_pause: until the next step opens nothing has to be generated, so attempts may be paused at the close.

        Raises:
          RunFailed: every Group failed for too long, or no row is left.
          RewardError, CreditError: a complete Group can't be scored; stops the run before any training on it.

        Cancellation: leaves the step open; the work block that is left then ends every Group.
        """
        is_last = self.is_last(rollout_id)
        partition = self.ledger.open(rollout_id, self.config.rollout_batch_size)
        step = Step(rollout_id=rollout_id, partition=partition)
        self.plan(rollout_id)
        async with self.accounting(step), self.watching():
            if partition.debt:
                await self._resume_attempts()
                self.unpark()
            self.residents.step = step
            self.residents.update()
            await step.closed.wait()
            if self.residents.failure is None:
                await self._close(partition, is_last=is_last, may_pause=may_pause)
        self.residents.step = None
        self.ledger.seal(partition)
        return self.result(rollout_id, sorted(partition.groups, key=lambda group: group.number), step.age_s)

    def plan(self, rollout_id: int) -> None:
        """Say how many Groups are at work beyond the debt in this step, and how many the next one begins with."""
        config = self.config
        ahead = config.agentic_prelaunch and not self.is_last(rollout_id)
        self.residents.margin = config.n_work_groups - config.rollout_batch_size
        self.residents.next_work = config.n_work_groups if ahead else 0

    def is_last(self, rollout_id: int) -> bool:
        """Whether no step comes after this one."""
        return self.n_steps is not None and rollout_id >= self.n_steps - 1

    @asynccontextmanager
    async def accounting(self, step: Step) -> AsyncIterator[None]:
        """Tell of a step: its start, its heartbeats, its end, and what kept it from ending well.

        Raises (on leaving):
          RelaxTrioError: the run's failure.
        """
        groups = 0 if step.partition is None else step.partition.target
        emit(
            "accounting_start",
            rollout=step.rollout_id,
            groups=groups,
            sessions=groups * self.config.n_samples_per_prompt,
            carried=step.n_scored,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._heartbeat, step, name=f"heartbeat of step {step.rollout_id}")
            yield
            nursery.cancel_scope.cancel(reason=f"step {step.rollout_id} closed")
        failure = self.residents.failure
        emit(
            "accounting_end",
            rollout=step.rollout_id,
            scored=step.n_scored,
            dropped=self.residents.tally.n_dropped,
            failed_sessions=self.residents.tally.n_failed_sessions,
            prepared=self.residents.desk.n_ready,
            debt=self.ledger.debt,
            seconds=step.age_s,
            failed=failure is not None,
        )
        if failure is not None:
            raise failure

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Tell of long waits for the length of the block."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_stalls, self._waits, self.heartbeat_s, name="stalls")
            yield
            nursery.cancel_scope.cancel(reason="the watch ended")

    def _waits(self) -> list[Wait]:
        step = self.residents.step
        owner = "between steps" if step is None else f"step {step.rollout_id}"
        return [wait for resident in self.residents.all for wait in long_waits(owner, resident.group, self.heartbeat_s)]

    def result(self, rollout_id: int, groups: Sequence[ScoredGroup], seconds: float) -> StepResult:
        """What a step that was open for `seconds` yields; the tally begins anew."""
        tally, self.residents.tally = self.residents.tally, Tally()
        return StepResult(
            rollout_id=rollout_id,
            groups=tuple(groups),
            n_dropped=tally.n_dropped,
            n_failed_sessions=tally.n_failed_sessions,
            n_filtered_groups=tally.n_filtered,
            n_stale_groups=tally.n_stale,
            n_set_aside_rows=len(self.rows.set_aside_rows),
            seconds=seconds,
            kv_metrics=self.kv_tally.take(self.shared),
        )

    # --- closing ----------------------------------------------------------------------------------------------

    async def _close(self, partition: Partition, *, is_last: bool, may_pause: bool) -> None:
        """What becomes of Groups when the debt is paid."""
        residents = self.residents
        if self.config.partial_rollout and not (is_last and not self.config.use_dynamic_global_batch_size):
            await self._wait_protected()
            if residents.failure is not None:
                return
            if self.config.pauses_attempts and may_pause and not is_last:
                await self._pause_attempts("between steps")
            else:
                await self.park("between steps")
            await self._wait_protected()
            if self.config.use_dynamic_global_batch_size:
                joined = self.ledger.fill_up(partition, multiple_of=self.data_parallel_size)
                emit("partition.sealed", partition=partition.name, groups=len(partition.groups), surplus=joined)
        if is_last:
            await self._pause.end()
            await residents.drop(residents.all, "the last step closed")
        elif not self.config.partial_rollout:
            kept = residents.unleased if self.config.agentic_prelaunch else ()
            await residents.drop([r for r in residents.all if r not in kept], "the step closed")

    async def _wait_protected(self) -> None:
        """Wait until no protected Group holds processes, or the run failed; its reward keeps nothing open."""
        while self.residents.failure is None and (protected := self._protected()):
            emit("step.waiting", protected=" ".join(resident.group.id for resident in protected))
            await self.residents.unless_failed(protected[0].vacated.wait)

    def _protected(self) -> list[Resident]:
        return [r for r in self.residents.leased if r.group.is_protected and not r.vacated.is_set()]

    # --- parking ----------------------------------------------------------------------------------------------

    async def park(self, reason: str) -> None:
        """Shut the gate, stop the clocks, bring back every attempt that may be interrupted.

        Those that are paused are let go first: an abort may not reach them before.

        Cancellation: the gate stays shut, aborts stand.
        """
        self._shut(reason)
        await self._pause.end()
        async with trio.open_nursery() as nursery:
            for session in self._interruptible():
                nursery.start_soon(session.park, name=f"park {session.name}")

    async def _pause_attempts(self, reason: str) -> None:
        """Shut the gate, stop the clocks, pause every attempt in the backend. Protected Groups have ended.

        Cancellation: the gate stays shut, the pause is on.
        """
        self._shut(reason)
        await self._pause.begin()
        for session in self._interruptible():
            for call in session.calls:
                call.note_pause()

    async def _resume_attempts(self) -> None:
        """Let paused attempts go on. Cancellation: the pause ends with the work."""
        for session in self._interruptible() if self._pause.is_on else ():
            for call in session.calls:
                call.note_resume()
        await self._pause.end()

    def _shut(self, reason: str) -> None:
        self.residents.generation.shut(reason)
        self.residents.update()
        for session in self._interruptible():
            session.halt()

    def _interruptible(self) -> list[Session]:
        sessions = (session for resident in self.residents.leased for session in resident.group.sessions)
        return [session for session in sessions if not session.is_protected]

    def unpark(self) -> None:
        """Open the gate: parked requests go on, and who was aborted too often is protected from here on."""
        if self.residents.generation.is_open:
            return
        self.residents.generation.open()
        most = self.config.partial_rollout_max_aborted_count if self.config.partial_rollout else math.inf
        for resident in self.residents.leased:
            for session in resident.group.sessions:
                session.unpark(most)
        self.residents.update()

    # --- evidence ---------------------------------------------------------------------------------------------

    async def _heartbeat(self, step: Step) -> None:
        """Tell at intervals that the step is still open, and what it has."""
        while True:
            await trio.sleep(self.heartbeat_s)
            emit(
                "idle_heartbeat",
                rollout=step.rollout_id,
                scored=step.n_scored,
                prepared=self.residents.desk.n_ready,
                at_work=len(self.residents.leased),
            )
