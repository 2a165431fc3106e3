"""The resident train Groups of a run: started on demand, leased, rewarded, accounted for; each exactly once.

Groups live here across steps. What a step is, and what becomes of Groups when it closes, is work.py's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import trio
from attrs import define, field

from relax_trio.config.tree import RolloutConfig
from relax_trio.data.rows import RowStream
from relax_trio.errors import CreditError, RelaxTrioError, RewardError, RunFailed
from relax_trio.events import emit
from relax_trio.ids import group_id
from relax_trio.reward.judge import judge_group
from relax_trio.reward.reward import RewardScorer
from relax_trio.runtime.demand import Demand, Standing, demand
from relax_trio.runtime.group import Complete, Dropped, Group
from relax_trio.runtime.leases import LeaseDesk
from relax_trio.runtime.ledger import Ledger, ScoredGroup
from relax_trio.runtime.outcome import Failed
from relax_trio.runtime.samples import build_samples
from relax_trio.runtime.shared import Shared, TurnLimits
from relax_trio.runtime.step import Step, Tally
from relax_trio.sync.gate import Gate

_TELL_AFTER_ROUNDS = 4
"""As many Groups as are at work at once, so often in a row, were given up by the user's hooks."""


@define(eq=False, kw_only=True)
class Resident:
    """One Group and what its owner knows of it.

    Attributes:
      scope: around its reward, and around the Group.
      vacated: its last process is gone and its permit is back.
      ended: it is scored or dropped, and accounted for.
      why_dropped: the first reason given to `drop`.
      filtered: why it is not worth training on, if a filter or the custom advantage said so.
    """

    group: Group
    why_dropped: str | None = None
    filtered: str | None = None
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    vacated: trio.Event = field(factory=trio.Event)
    ended: trio.Event = field(factory=trio.Event)

    def drop(self, reason: str) -> None:
        """End the Group, or its reward where its processes are gone; plain."""
        self.why_dropped = self.why_dropped or reason
        if self.vacated.is_set():
            self.scope.cancel(reason=f"drop {self.group.id}: {reason}")
        else:
            self.group.drop(reason)


@define(eq=False, kw_only=True)
class Residents:
    """Every train Group between its start and its score.

    Attributes:
      rows: where Groups take their rows from and return them to.
      ledger: who scored Groups pay to.
      generation: gate of all their attempts.
      next_group: number of the next Group; part of the resume state.
      row_failures: Groups that failed, by row; part of the resume state.
      assigns_credit: False for rollout without training, which any number of contexts may come from.
      margin: Groups at work beyond the debt.
      next_work: Groups that the next step begins with, where they are prepared ahead.
      step: the open step; closed when nothing is owed any more, or on a failure.
      tally: what happened since the last step closed.
      failure: why the run can't go on; the first one stands.
    """

    shared: Shared
    config: RolloutConfig
    limits: TurnLimits
    rows: RowStream
    scorer: RewardScorer
    ledger: Ledger
    next_group: int = 0
    row_failures: Counter[int] = field(factory=Counter)
    assigns_credit: bool = True
    generation: Gate = field(factory=Gate)
    desk: LeaseDesk = field(factory=LeaseDesk)
    margin: int = 0
    next_work: int = 0
    step: Step | None = None
    tally: Tally = field(factory=Tally)
    failure: RelaxTrioError | None = None
    failed: trio.Event = field(factory=trio.Event)
    _alive: dict[Group, Resident] = field(factory=dict)
    _wanted: Gate = field(factory=lambda: Gate(shut="no Group is wanted"))
    _permits: trio.CapacityLimiter = field(init=False)
    _failures_in_a_row: int = 0
    _given_up_in_a_row: int = 0
    _nursery: trio.Nursery = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._permits = trio.CapacityLimiter(self.config.n_resident_groups)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Own Groups for the length of the block; on leaving, every Group is ended and joined."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._prepare, name="prepare")
            yield
            self._nursery.cancel_scope.cancel(reason="the work ended")

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def all(self) -> tuple[Resident, ...]:
        """Every resident, in order of start."""
        return tuple(self._alive.values())

    @property
    def leased(self) -> tuple[Resident, ...]:
        """Those with a lease, in Runtime or in Reward."""
        return tuple(resident for resident in self._alive.values() if resident.group.lease.is_set())

    @property
    def unleased(self) -> tuple[Resident, ...]:
        """Those that are prepared or on their way there."""
        return tuple(resident for resident in self._alive.values() if not resident.group.lease.is_set())

    @property
    def n_permits_used(self) -> int:
        """Group permits that are taken."""
        return self._permits.borrowed_tokens

    # --- acting -----------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Let leases and starts follow from the state. Plain; called after every change of it."""
        wanted = self._demand()
        self.desk.want(wanted.leases if self.generation.is_open and self.failure is None else 0)
        if wanted.starts and self.failure is None:
            self._wanted.open()
        else:
            self._wanted.shut("no Group is wanted")
        if self.step is not None and (self.failure is not None or not self.ledger.debt):
            self.step.closed.set()

    def fail(self, error: RelaxTrioError) -> None:
        """The run can't go on; the first error stands."""
        if self.failure is None:
            self.failure = error
            self.failed.set()
            self.update()

    async def unless_failed(self, wait: Callable[[], Awaitable[None]]) -> None:
        """Wait, but not past the run's failure. Cancellation: as `wait`."""
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await self.failed.wait()
                nursery.cancel_scope.cancel(reason="the run failed")

            nursery.start_soon(watch, name="watch for a failure")
            await wait()
            nursery.cancel_scope.cancel(reason="waited for")

    async def drop(self, residents: Iterable[Resident], reason: str) -> None:
        """Drop Groups and wait until they are accounted for. Cancellation: they are dropped all the same."""
        doomed = list(residents)
        for resident in doomed:
            resident.drop(reason)
        for resident in doomed:
            await resident.ended.wait()

    def _demand(self) -> Demand:
        n_leased = len(self.leased)
        standing = Standing(
            debt=self.ledger.debt,
            margin=self.margin,
            n_leased=n_leased,
            n_unleased=len(self._alive) - n_leased,
            next_work=self.next_work,
            n_surplus=len(self.ledger.surplus),
            retains=self.ledger.retains,
        )
        return demand(standing)

    # --- prepare ----------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Start a Group whenever one is wanted and a permit is free."""
        while True:
            await self._wanted.wait_open()
            permit = object()
            await self._permits.acquire_on_behalf_of(permit)
            if self._wanted.is_open:
                self._start(permit)
            else:
                self._permits.release_on_behalf_of(permit)

    def _start(self, permit: object) -> None:
        """Take a row and start its Group, which returns the permit when its last process is gone."""
        try:
            task = self.rows.take()
        except RunFailed as exc:
            self._permits.release_on_behalf_of(permit)
            self.fail(exc)
            return
        group = Group(
            id=group_id(self.next_group),
            number=self.next_group,
            task=task,
            n_places=self.config.n_samples_per_prompt,
            mode="train",
            limits=self.limits,
            shared=self.shared,
            leases=self.desk,
            generation=self.generation,
            session_retries=self.config.agentic_session_retries,
            agent_retries=self.config.agentic_agent_retries,
        )
        self.next_group += 1
        resident = self._alive[group] = Resident(group=group)
        self.update()
        emit("group.started", group=group.id, row=task.row, source=task.source)
        self._nursery.start_soon(self._own, resident, permit, name=f"group {group.id}")

    # --- one Group --------------------------------------------------------------------------------------------

    async def _own(self, resident: Resident, permit: object) -> None:
        """Run one Group, then its reward; return its permit and account for its row exactly once."""
        group = resident.group
        scored: ScoredGroup | None = None
        outcome: Complete | Dropped = Dropped(reason="the work ended")
        try:
            with resident.scope:
                try:
                    outcome = await group.run()
                finally:
                    self._permits.release_on_behalf_of(permit)
                    resident.vacated.set()
                if isinstance(outcome, Complete) and resident.why_dropped is None:
                    scored = await self._score(resident, outcome)
        finally:
            del self._alive[group]
            self._account(resident, outcome, scored)
            resident.ended.set()
            self.update()

    async def _score(self, resident: Resident, outcome: Complete) -> ScoredGroup | None:
        """Reward and credit. A failure of either ends the run: it is the user's to mend, not to be skipped."""
        group, samples = resident.group, build_samples(resident.group, outcome, self.shared.codec)
        try:
            given_up = await judge_group(samples, self.scorer, assigns_credit=self.assigns_credit)
        except (RewardError, CreditError) as exc:
            self.fail(exc)
            return None
        if given_up is not None:
            resident.filtered = given_up
            return None
        return ScoredGroup(
            id=group.id,
            number=group.number,
            task=group.task,
            samples=tuple(samples),
            reports=tuple(session.report for session in outcome.sessions),
        )

    def _account(self, resident: Resident, outcome: Complete | Dropped, scored: ScoredGroup | None) -> None:
        """Pay or return the row. Plain: nothing can come between."""
        group = resident.group
        self.tally.n_failed_sessions += group.n_failed_sessions
        if isinstance(outcome, Complete):
            self._failures_in_a_row = 0
        if scored is not None and self.failure is None and self.ledger.pay(scored):
            self._given_up_in_a_row = 0
            emit("group.scored", group=group.id)
            return
        self.tally.n_dropped += 1
        emit("group.dropped", group=group.id, reason=self._why_dropped(resident, outcome, scored))
        failure = outcome.failure if isinstance(outcome, Dropped) else None
        if resident.filtered is not None:
            # Its row is done: given back it would come again at once, and most likely be filtered again.
            self._count_given_up(resident.filtered)
        elif failure is None:
            self.rows.give_back(group.task)
        else:
            self._count_failure(group, failure)

    def _why_dropped(self, resident: Resident, outcome: Complete | Dropped, scored: ScoredGroup | None) -> str:
        if isinstance(outcome, Dropped):
            return outcome.reason
        if scored is not None:
            return "surplus at the close of the step" if self.failure is None else "the run failed"
        return resident.filtered or resident.why_dropped or "it could not be scored"

    def _count_given_up(self, reason: str) -> None:
        """Groups that are never kept are told of at intervals: a step goes on for as long as there are rows."""
        self.tally.n_filtered += 1
        self._given_up_in_a_row += 1
        if self._given_up_in_a_row % (_TELL_AFTER_ROUNDS * self.config.n_work_groups) == 0:
            emit("groups.none_kept", groups=self._given_up_in_a_row, reason=reason)

    def _count_failure(self, group: Group, failure: Failed) -> None:
        """A row whose Groups fail too often, whoever's fault, is set aside; a run of nothing but failures ends."""
        row = group.task.row
        self.row_failures[row] += 1
        if self.row_failures[row] >= self.config.max_row_failures:
            self.rows.set_aside(group.task, str(failure.error).splitlines()[0])
            emit("row.set_aside", source=group.task.source, failures=self.row_failures[row])
        else:
            self.rows.give_back(group.task)
        self._failures_in_a_row += 1
        limit = self.config.n_work_groups + self.config.max_row_failures
        if self._failures_in_a_row >= limit:
            self.fail(
                RunFailed(
                    f"{self._failures_in_a_row} Groups in a row failed and none completed; the last failure: "
                    f"{failure.error}"
                )
            )
