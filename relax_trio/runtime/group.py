"""One row rolled out at several places: the unit of capacity, barrier and drop."""

from __future__ import annotations

from typing import TypeAlias

import trio
from attrs import define, field, frozen

from relax_trio.data.task import TaskInput
from relax_trio.events import emit
from relax_trio.ids import GroupId, place_id
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
      leases: gate of Runtime: a full barrier is leased only while it is open.
      n_failed_sessions: Sessions that failed so far, those that were tried again included.
      session_retries, agent_retries: new Sessions at a place after a failure outside, or of, the agent.
    """

    id: GroupId
    number: int
    task: TaskInput
    n_places: int
    mode: Mode
    limits: TurnLimits
    shared: Shared
    leases: Gate
    first_sample: int = 0
    session_retries: int = 2
    agent_retries: int = 0
    n_failed_sessions: int = 0
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
    def is_ready(self) -> bool:
        """Prepared: every place has a live request and the lease is not given yet."""
        return self.barrier.is_full and not self.lease.is_set()

    def long_waits(self, seconds: float) -> list[str]:
        """What the Group has waited for longer than `seconds`: the chain from place to request to its wait."""
        waits = []
        for index, session in enumerate(self._sessions):
            if session is None or self._completed[index] is not None:
                continue
            live = session.long_waits(seconds)
            waits += [f"{session.place} {wait}" for wait in live]
        return waits

    async def run(self) -> GroupOutcome:
        """Run every place to its end.

        Returns:
          Complete, or Dropped after `drop` or the failure of a place; either way no process of the Group is left.

        Cancellation: discards every Session, then raises.
        """
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._lease_when_full, name=f"lease {self.id}")
                async with trio.open_nursery() as places:
                    for index in range(self.n_places):
                        places.start_soon(self._run_place, index, name=f"place {place_id(self.id, index)}")
                nursery.cancel_scope.cancel(reason=f"all places of {self.id} ended")
        sessions = tuple(outcome for outcome in self._completed if outcome is not None)
        if len(sessions) == self.n_places:
            return Complete(sessions=sessions)
        assert self._dropped is not None, "a Group ends complete or dropped"
        return self._dropped

    def drop(self, reason: str, failure: Failed | None = None) -> None:
        """End the Group; the first reason stands."""
        if self._dropped is None:
            self._dropped = Dropped(reason=reason, failure=failure)
            self._scope.cancel(reason=f"drop {self.id}: {reason}")

    async def _lease_when_full(self) -> None:
        """Give the lease at a moment when the barrier is full and Runtime takes Groups; once given, it stays."""
        while not (self.barrier.is_full and self.leases.is_open):
            await self.barrier.wait_full()
            emit("group.prepared", group=self.id)
            await self.leases.wait_open()
        self.lease.set()
        for session in self._sessions:
            if session is not None:
                session.budget.resume()
        emit("group.leased", group=self.id)

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
            barrier=self.barrier,
            n_try=n_try,
        )
