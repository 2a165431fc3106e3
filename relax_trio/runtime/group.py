"""One row rolled out at several places: the unit of capacity, barrier and drop."""

from __future__ import annotations

from typing import TypeAlias

import trio
from attrs import define, field, frozen

from relax_trio.data.task import TaskInput
from relax_trio.events import emit
from relax_trio.ids import GroupId, place_id
from relax_trio.runtime.leases import LeaseDesk
from relax_trio.runtime.outcome import Completed, Failed
from relax_trio.runtime.session import Session
from relax_trio.runtime.shared import Mode, Shared, TurnLimits
from relax_trio.sync.barrier import PresenceBarrier
from relax_trio.sync.gate import Gate


@frozen(kw_only=True)
class Complete:
    """Every place completed."""

    sessions: tuple[Completed, ...]


@frozen(kw_only=True)
class Dropped:
    """The Group ended without all its places; `failure` when one of them failed."""

    reason: str
    failure: Failed | None = None


GroupOutcome: TypeAlias = Complete | Dropped


@define(eq=False, kw_only=True)
class Group:
    """One Group.

    Attributes:
      number: running number in the run.
      first_sample: sample number of place 0 of this row (eval repeats a row in singleton Groups).
      leases: where the Group stands in line for its lease.
      generation: gate of its attempts.
      n_failed_sessions: Sessions that failed so far, those that were tried again included.
      completed_s: when its last Session completed.
      session_retries, agent_retries: new Sessions at a place after a failure outside, or of, the agent.
    """

    id: GroupId
    number: int
    task: TaskInput
    n_places: int
    mode: Mode
    limits: TurnLimits
    shared: Shared
    leases: LeaseDesk
    generation: Gate = field(factory=Gate)
    first_sample: int = 0
    session_retries: int = 2
    agent_retries: int = 0
    n_failed_sessions: int = 0
    completed_s: float | None = None
    barrier: PresenceBarrier = field(init=False)
    lease: trio.Event = field(factory=trio.Event)
    _scope: trio.CancelScope = field(factory=trio.CancelScope)
    _sessions: list[Session | None] = field(init=False)
    _completed: list[Completed | None] = field(init=False)
    _dropped: Dropped | None = None

    def __attrs_post_init__(self) -> None:
        self.barrier = PresenceBarrier(self.n_places)
        self._sessions = [None] * self.n_places
        self._completed = [None] * self.n_places

    @property
    def sessions(self) -> list[Session]:
        """The Sessions that are not finished, at most one a place."""
        pairs = zip(self._sessions, self._completed, strict=True)
        return [session for session, completed in pairs if session is not None and completed is None]

    @property
    def is_protected(self) -> bool:
        """Whether a Session of it is."""
        return any(session.is_protected for session in self.sessions)

    @property
    def is_interrupted(self) -> bool:
        """Whether every unfinished Session is parked or idle between requests; False where none is unfinished."""
        sessions = self.sessions
        return bool(sessions) and all(session.is_interrupted for session in sessions)

    @property
    def may_be_leased(self) -> bool:
        """Whether every place has a live request at this moment, and the Group was not dropped."""
        return self.barrier.is_full and self._dropped is None

    async def run(self) -> GroupOutcome:
        """Run every place to its end.

        Returns:
          Complete, or Dropped after `drop` or the failure of a place; either way no process of the Group is left.

        Cancellation: discards every Session, then raises.
        """
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._stand_in_line, name=f"lease {self.id}")
                async with trio.open_nursery() as places:
                    for index in range(self.n_places):
                        places.start_soon(self._run_place, index, name=f"place {place_id(self.id, index)}")
                nursery.cancel_scope.cancel(reason=f"all places of {self.id} ended")
        sessions = tuple(outcome for outcome in self._completed if outcome is not None)
        if len(sessions) == self.n_places:
            self.completed_s = trio.current_time()
            return Complete(sessions=sessions)
        assert self._dropped is not None, "a Group ends complete or dropped"
        return self._dropped

    def drop(self, reason: str, failure: Failed | None = None) -> None:
        """End the Group; the first reason stands."""
        if self._dropped is None:
            self._dropped = Dropped(reason=reason, failure=failure)
            self._scope.cancel(reason=f"drop {self.id}: {reason}")

    def give_lease(self) -> None:
        """Lease the Group to Runtime; once given, it stays."""
        self.lease.set()
        for session in self.sessions:
            session.start_clock()
        emit("group.leased", group=self.id)

    async def _stand_in_line(self) -> None:
        """Stand in line for the lease exactly while every place has a live request."""
        while not self.lease.is_set():
            await self.barrier.wait_full()
            with self.leases.in_line(self):
                await self.barrier.wait_not_full()

    async def _run_place(self, index: int) -> None:
        """Run Sessions at one place until one completes or the retries are used up."""
        retries = {"engine": self.session_retries, "agent": self.agent_retries}
        n_try = 0
        while True:
            session = self._make_session(index, n_try)
            self._sessions[index] = session
            result = await session.run()
            if isinstance(result, Completed):
                self._completed[index] = result
                return
            self.n_failed_sessions += 1
            fault = "agent" if result.is_agents_fault else "engine"
            if not retries[fault]:
                self.drop(f"{session.place} failed", result)
                return
            retries[fault] -= 1
            n_try += 1
            emit("session.retried", place=session.place, n_try=n_try, fault=fault)

    def _make_session(self, index: int, n_try: int) -> Session:
        return Session(
            place=place_id(self.id, index),
            group=self.id,
            index=index,
            sample=self.first_sample + index,
            mode=self.mode,
            task=self.task,
            limits=self.limits,
            shared=self.shared,
            lease=self.lease,
            generation=self.generation,
            barrier=self.barrier,
            n_try=n_try,
        )
