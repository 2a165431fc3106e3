"""The work: it owns every train Group across steps, prepares new ones on demand and scores the complete ones.

A step is an accounting window (step.py) over this block, not an owner: Groups live here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from attrs import define, field

from relax_trio.config.tree import RolloutConfig
from relax_trio.data.rows import RowStream
from relax_trio.errors import CreditError, RewardError, RunFailed
from relax_trio.events import emit
from relax_trio.ids import group_id
from relax_trio.reward.credit import assign_credit
from relax_trio.reward.reward import RewardScorer
from relax_trio.runtime.group import Complete, Dropped, Group
from relax_trio.runtime.outcome import Failed
from relax_trio.runtime.samples import build_samples
from relax_trio.runtime.shared import Shared, TurnLimits
from relax_trio.runtime.step import ScoredGroup, Step, StepResult
from relax_trio.sync.gate import Gate


@define(eq=False, kw_only=True)
class Work:
    """The train Groups of a run.

    Attributes:
      rows: where Groups take their rows from and return them to.
      next_group: number of the next Group; part of the resume state.
      row_failures: failures of agents by row; part of the resume state.
      assigns_credit: False for rollout without training, which any number of contexts may come from.
      heartbeat_s: a step tells at these intervals that it is open, and of waits that are longer.
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
    _leases: Gate = field(factory=lambda: Gate(shut="no step is open"))
    _demand: Gate = field(factory=lambda: Gate(shut="no step is open"))
    _idle: Gate = field(factory=Gate)
    _resident: trio.CapacityLimiter = field(init=False)
    _alive: dict[Group, trio.CancelScope] = field(factory=dict)
    _failures_in_a_row: int = 0
    _step: Step | None = None
    _nursery: trio.Nursery = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._resident = trio.CapacityLimiter(self.config.n_resident_groups)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Own Groups for the length of the block; on leaving, every Group is ended and joined."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._prepare, name="prepare")
            yield
            self._nursery.cancel_scope.cancel(reason="the work ended")

    async def run_step(self, rollout_id: int) -> StepResult:
        """Run one rollout step: exactly `rollout_batch_size` scored Groups.

        Raises:
          RunFailed: every Group failed for too long, or no row is left.
          RewardError, CreditError: a complete Group can't be scored; stops the run before any training on it.

        Cancellation: leaves the step open; the work block that is left then ends every Group.
        """
        config = self.config
        step = Step(rollout_id=rollout_id, target=config.rollout_batch_size, n_work=config.n_work_groups)
        self._step = step
        emit(
            "accounting_start",
            rollout=rollout_id,
            groups=step.target,
            sessions=step.target * config.n_samples_per_prompt,
        )
        self._leases.open()
        self._update()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._heartbeat, step, name=f"heartbeat of step {rollout_id}")
            await step.closed.wait()
            nursery.cancel_scope.cancel(reason=f"step {rollout_id} closed")
        self._leases.shut("between steps")
        self._update()
        for group, scope in self._alive.items():
            group.drop("the step closed")
            scope.cancel(reason=f"step {rollout_id} closed")
        await self._idle.wait_open()
        self._step = None
        emit(
            "accounting_end",
            rollout=rollout_id,
            scored=step.n_scored,
            dropped=step.n_dropped,
            failed_sessions=step.n_failed_sessions,
            seconds=step.age_s,
            failed=step.failure is not None,
        )
        return step.result(len(self.rows.set_aside_rows))

    async def _heartbeat(self, step: Step) -> None:
        """Tell at intervals that the step is still open, and what it has."""
        while True:
            await trio.sleep(self.heartbeat_s)
            emit(
                "idle_heartbeat",
                rollout=step.rollout_id,
                scored=step.n_scored,
                prepared=sum(1 for group in self._alive if group.is_ready),
                at_work=step.n_alive,
            )
            for group in self._alive:
                waits = group.long_waits(self.heartbeat_s)
                if waits:
                    leased = group.lease.is_set()
                    emit(
                        "group.stalled", rollout=step.rollout_id, group=group.id, leased=leased, waits="; ".join(waits)
                    )

    # --- prepare ------------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Start a Group whenever one is wanted and a permit is free."""
        while True:
            await self._demand.wait_open()
            permit = object()
            await self._resident.acquire_on_behalf_of(permit)
            if self._step is None or not self._step.demand:
                self._resident.release_on_behalf_of(permit)
                continue
            self._start_group(self._step, permit)

    def _start_group(self, step: Step, permit: object) -> None:
        """Take a row and start its Group, which returns the permit when its last process is gone."""
        try:
            task = self.rows.take()
        except RunFailed as exc:
            self._resident.release_on_behalf_of(permit)
            step.fail(exc)
            self._update()
            return
        group = Group(
            id=group_id(self.next_group),
            number=self.next_group,
            task=task,
            n_places=self.config.n_samples_per_prompt,
            mode="train",
            limits=self.limits,
            shared=self.shared,
            leases=self._leases,
            session_retries=self.config.agentic_session_retries,
            agent_retries=self.config.agentic_agent_retries,
        )
        self.next_group += 1
        step.n_alive += 1
        self._alive[group] = trio.CancelScope()
        self._update()
        emit("group.started", group=group.id, row=task.row, source=task.source)
        self._nursery.start_soon(self._own_group, group, step, permit, name=f"group {group.id}")

    # --- one Group ----------------------------------------------------------------------------------------------

    async def _own_group(self, group: Group, step: Step, permit: object) -> None:
        """Run one Group, then its reward; return its permit and account for its row exactly once."""
        scored: ScoredGroup | None = None
        outcome: Complete | Dropped = Dropped(reason="the work ended")
        try:
            with self._alive[group]:
                try:
                    outcome = await group.run()
                finally:
                    self._resident.release_on_behalf_of(permit)
                if isinstance(outcome, Complete):
                    scored = await self._score(group, outcome, step)
        finally:
            del self._alive[group]
            step.n_alive -= 1
            self._account(group, outcome, scored, step)
            self._update()

    async def _score(self, group: Group, outcome: Complete, step: Step) -> ScoredGroup | None:
        """Reward and credit. A failure of either fails the step: it is the user's to mend, not to be skipped."""
        samples = build_samples(group, outcome, self.shared.codec)
        try:
            await self.scorer.score(samples)
            if self.assigns_credit:
                assign_credit(samples, self.scorer.config)
        except (RewardError, CreditError) as exc:
            step.fail(exc)
            return None
        return ScoredGroup(
            id=group.id,
            number=group.number,
            samples=tuple(samples),
            reports=tuple(session.report for session in outcome.sessions),
        )

    def _account(self, group: Group, outcome: Complete | Dropped, scored: ScoredGroup | None, step: Step) -> None:
        """Pay the step or return the row. Plain: nothing can come between."""
        step.n_failed_sessions += group.n_failed_sessions
        if isinstance(outcome, Complete):
            self._failures_in_a_row = 0
        if scored is not None and step.pay(scored):
            emit("group.scored", group=group.id, rollout=step.rollout_id)
            return
        step.n_dropped += 1
        failure = outcome.failure if isinstance(outcome, Dropped) else None
        surplus = "its reward failed" if step.failure is not None else "surplus at the close of the step"
        reason = outcome.reason if isinstance(outcome, Dropped) else surplus
        emit("group.dropped", group=group.id, reason=reason)
        if failure is None:
            self.rows.give_back(group.task)
            return
        self._count_failure(group, failure, step)

    def _count_failure(self, group: Group, failure: Failed, step: Step) -> None:
        """A row whose agents fail too often is set aside; a run in which nothing but failures happens ends."""
        row = group.task.row
        if failure.is_agents_fault:
            self.row_failures[row] += 1
        if self.row_failures[row] >= self.config.max_row_failures:
            self.rows.set_aside(group.task, str(failure.error).splitlines()[0])
            emit("row.set_aside", source=group.task.source, failures=self.row_failures[row])
        else:
            self.rows.give_back(group.task)
        self._failures_in_a_row += 1
        limit = self.config.n_work_groups + self.config.max_row_failures
        if self._failures_in_a_row >= limit:
            step.fail(
                RunFailed(
                    f"{self._failures_in_a_row} Groups in a row failed and none completed; the last failure: "
                    f"{failure.error}"
                )
            )

    def _update(self) -> None:
        """Set the gates that follow from the state."""
        step = self._step
        if step is not None and step.demand:
            self._demand.open()
        else:
            self._demand.shut("no Group is wanted")
        if self._alive:
            self._idle.shut("Groups are at work")
        else:
            self._idle.open()
