"""One try at a place: a credential, a forest, an active-time budget, and the requests it serves.

The Session owns its requests' tasks in a private nursery. With an agent it also owns the agent process (`run`); without
one (`relax-trio serve`) it lives for the length of an `open` block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import outcome
import trio
from attrs import define, field

from relax_trio.agent.base import AgentHandle, AgentSpec
from relax_trio.api.history import HistoryMemo
from relax_trio.data.json import JsonObject
from relax_trio.data.request import CanonicalRequest
from relax_trio.data.sample import Context
from relax_trio.data.task import TaskInput
from relax_trio.errors import (
    AgentError,
    AgentTimeout,
    BackendError,
    EngineUnavailable,
    ExportError,
    InternalError,
    ProtocolError,
    SessionDiscarded,
)
from relax_trio.events import emit
from relax_trio.forest.export import export_contexts, shared_trained_tokens
from relax_trio.forest.forest import SessionForest
from relax_trio.forest.view import forest_json
from relax_trio.ids import Credential, GroupId, PlaceId, RequestId, StateHash, WeightVersion, new_credential
from relax_trio.runtime.call import Call, Result
from relax_trio.runtime.count import count_prompt
from relax_trio.runtime.images import Images
from relax_trio.runtime.outcome import Completed, Failed, SessionOutcome, SessionReport
from relax_trio.runtime.request import park_request, run_request
from relax_trio.runtime.shared import Mode, Shared, TurnLimits
from relax_trio.sync.barrier import PresenceBarrier
from relax_trio.sync.budget import ActiveBudget
from relax_trio.sync.cleanup import cleanup_scope
from relax_trio.sync.gate import Gate

CLOSE_SESSION_S = 2.0
"""Bound of telling the backend that a Session ended."""

MAX_SKIPPED = 32
"""Kinds of skipped items that are remembered; their names are the client's."""

SETTLE_S = 5.0
"""How long the fate of a written reply may stay unknown once its agent is gone."""


@define(eq=False, kw_only=True)
class Session:
    """One Session.

    Attributes:
      place: public name; `name` adds the try, unique in the run.
      index: position in the Group, from 0.
      sample: sample number of the row, for derived seeds.
      lease: set once the Group is leased to Runtime.
      generation: shut while no attempt of this Session may start, unless it is protected.
      barrier: where live requests are counted, None outside a Group.
      is_protected: exempt from parking and from pauses.
      skipped: kinds of items and hosted tools that its requests held and that were left out.
      histories: what its requests began with, for those that go on from there.
      images: those of its requests, read.
    """

    place: PlaceId
    group: GroupId
    index: int
    sample: int = 0
    mode: Mode
    task: TaskInput
    limits: TurnLimits
    shared: Shared
    lease: trio.Event
    generation: Gate = field(factory=Gate)
    barrier: PresenceBarrier | None = None
    n_try: int = 0
    is_protected: bool = False
    started_s: float = field(factory=trio.current_time)
    credential: Credential = field(factory=new_credential, repr=False)
    forest: SessionForest = field(init=False)
    budget: ActiveBudget = field(init=False)
    calls: list[Call] = field(factory=list)
    flags: Counter[str] = field(factory=Counter)
    skipped: dict[str, None] = field(factory=dict)
    histories: HistoryMemo = field(factory=HistoryMemo)
    images: Images = field(factory=Images)
    _is_open: bool = False
    _n_shared_tokens: int = 0
    _failure: BackendError | None = None
    _repeats: Counter[StateHash] = field(factory=Counter)
    _nursery: trio.Nursery = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.forest = SessionForest(unechoed_reasoning=self.shared.unechoed_reasoning)
        self.budget = ActiveBudget(self.shared.agent_timeout_s)

    @property
    def name(self) -> str:
        """Place and try: the Session's public key on the backend and in rids."""
        return f"{self.place}-{self.n_try}"

    @property
    def n_aborted(self) -> int:
        """How often its attempts were interrupted: aborted and sent round again, or paused."""
        return sum(attempt.n_interruptions for call in self.calls for attempt in call.attempts)

    # --- owned by the place ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Serve requests for the length of the block; on leaving, discard those that are left."""
        try:
            async with trio.open_nursery() as self._nursery:
                self._is_open = True
                try:
                    with self.shared.sessions.listed(self):
                        yield
                finally:
                    self._is_open = False
                    self.histories.clear()
                self._nursery.cancel_scope.cancel(reason=f"session {self.name} ended")
        finally:
            with cleanup_scope(CLOSE_SESSION_S, f"cache of session {self.name}"):
                await self.shared.backend.close_session(self.name)

    async def run(self) -> SessionOutcome:
        """Run the agent and export what it selected.

        Cancellation: discards the Session: the agent's process tree is ended, its requests are cancelled.
        """
        result: SessionOutcome | None = None
        async with self.open():
            result = await self._run_agent()
        if self._failure is not None and not isinstance(result, Completed):
            return Failed(place=self.place, error=self._failure, report=self.report())
        assert result is not None, "a Session ends by its agent or by its own failure"
        return result

    async def _run_agent(self) -> SessionOutcome:
        spec = AgentSpec(
            place=self.place,
            group=self.group,
            credential=self.credential,
            base_url=self.shared.base_url,
            mode=self.mode,
            task=self.task,
        )
        try:
            async with self.shared.launcher.open(spec) as agent:
                emit("session.started", place=self.place, n_try=self.n_try, pid=agent.pid)
                contexts = await self._supervise(agent)
        except (AgentError, ExportError) as exc:
            emit("session.failed", place=self.place, n_try=self.n_try, error=f"{type(exc).__name__}: {exc}")
            return Failed(place=self.place, error=exc, report=self.report())
        emit("session.completed", place=self.place, n_contexts=len(contexts), n_requests=len(self.calls))
        return Completed(contexts=contexts, report=self.report())

    async def _supervise(self, agent: AgentHandle) -> tuple[Context, ...]:
        """Wait for the agent within its budget, read its output, export."""
        try:
            self.start_clock()
            with self.budget.scope:
                await agent.wait()
            self.budget.pause()
            if self.budget.is_spent:
                raise AgentTimeout(
                    f"session {self.place}: the agent spent its {self.shared.agent_timeout_s:g} s of active time "
                    "(--agent-timeout)",
                    tail=agent.log_tail(),
                )
            output = await agent.read_output()
            await self._wait_replies_settled()
            contexts = export_contexts(self.forest, output, dedup_shared_turns=self.shared.dedup_shared_turns)
            self._n_shared_tokens = shared_trained_tokens(contexts)
            return contexts
        except AgentError:
            agent.mark_failed()
            raise
        except ExportError as exc:
            agent.mark_failed()
            tail = agent.log_tail()
            story = f"; the end of run.log follows\n{tail}" if tail else ""
            raise type(exc)(f"session {self.place}: {exc}{story}") from exc
        except trio.Cancelled:
            if self._failure is not None:
                agent.mark_failed()
            raise

    async def _wait_replies_settled(self) -> None:
        """Wait until it is known of every answered request whether its reply was delivered.

        An agent may read its last byte, exit, and be reaped before the task that wrote the byte runs again.
        """
        with trio.move_on_after(SETTLE_S) as scope:
            for call in self.calls:
                if call.done.is_set():
                    await call.wait_let_go()
        if scope.cancelled_caught:
            emit("reply.unsettled", place=self.place, seconds=SETTLE_S)

    # --- parking ----------------------------------------------------------------------------------------------

    @property
    def may_generate(self) -> bool:
        """Whether an attempt may start now."""
        return self.is_protected or self.generation.is_open

    async def wait_may_generate(self) -> None:
        """Return at a moment when an attempt may start. Cancellation: safe."""
        while not self.may_generate:
            await self.generation.wait_open()

    def start_clock(self) -> None:
        """Spend active time from now on, if the Group is leased and the Session is not parked."""
        if self.lease.is_set() and self.may_generate:
            self.budget.resume()

    def halt(self) -> None:
        """Stop the clock, and send requests in the line of admission back to the gate, which is shut. Plain."""
        self.budget.pause()
        if self.shared.admission is not None:
            self.shared.admission.recall(self.name)

    async def park(self) -> None:
        """Bring every attempt back, behind `halt`; its request keeps the tokens and waits at the shut gate.

        Cancellation: aborts stand; requests are in order.
        """
        async with trio.open_nursery() as nursery:
            for call in self.calls:
                if call.flight is not None:
                    nursery.start_soon(park_request, call, self, name=f"park {self.name}.{call.request_id}")

    def unpark(self, max_aborted: float) -> None:
        """Go on; a Session that was aborted `max_aborted` times is protected from here on."""
        self.is_protected = self.is_protected or self.n_aborted >= max_aborted
        self.start_clock()

    @property
    def is_interrupted(self) -> bool:
        """Whether no attempt runs: it is parked, or idle between requests."""
        return all(call.flight is None for call in self.calls)

    # --- called by front halves and by requests ---------------------------------------------------------------

    def submit(self, request: CanonicalRequest) -> Call:
        """Accept a model request; its work starts in this Session's nursery.

        A marked retry joins the call of the same body that is in flight, or whose reply was never delivered.

        Raises:
          EngineUnavailable: the run is shutting down.
          SessionDiscarded: the Session ended while the request was read.
        """
        self._refuse_late()
        if request.retry and (twin := self._undelivered(request.digest)) is not None:
            twin.attach()
            emit("request.joined", place=self.place, request=twin.request_id)
            return twin
        call = Call(request_id=RequestId(f"r{len(self.calls) + 1}"), request=request, grace_s=self.shared.retry_grace_s)
        self.calls.append(call)
        self._nursery.start_soon(self._serve, call, name=f"request {self.name}.{call.request_id}")
        if self.barrier is not None:
            self.barrier.arrive(self.index)
        self._tell_skipped(call)
        return call

    async def count_tokens(self, request: CanonicalRequest) -> int:
        """Tokens of the prompt that `request` would be served from; nothing is begun and nothing committed.

        Raises:
          ProtocolError: as `submit`, or the chat template refuses the conversation.

        Cancellation: safe.
        """
        self._refuse_late()
        return await count_prompt(request, self)

    def fail(self, error: BackendError) -> None:
        """The engine failed this Session: discard it; its place may try again."""
        if self._failure is None:
            self._failure = error
            emit("session.failed", place=self.place, n_try=self.n_try, error=f"{type(error).__name__}: {error}")
            self._nursery.cancel_scope.cancel(reason=f"session {self.name}: {type(error).__name__}")

    def repeats(self, state: StateHash) -> int:
        """How many turns from `state` were begun before this one; counts this one."""
        self._repeats[state] += 1
        return self._repeats[state] - 1

    async def _serve(self, call: Call) -> None:
        """The back half: run the request inside its call's scope and settle it exactly once."""
        result: Result = outcome.Error(
            SessionDiscarded(f"request {call.request_id} was discarded: its Session {self.place} ended")
        )
        try:
            with call.scope:
                result = outcome.Value(await run_request(call, self))
            if call.scope.cancelled_caught:
                result = outcome.Error(InternalError(f"request {call.request_id}: its client left and did not return"))
        except ProtocolError as exc:
            result = outcome.Error(exc)
        finally:
            if self.barrier is not None:
                self.barrier.withdraw(self.index)
            call.settle(result)

    def _refuse_late(self) -> None:
        if not self._is_open:
            raise SessionDiscarded(f"session {self.place} has ended")
        if self.shared.sessions.closing:
            raise EngineUnavailable("the run is shutting down")

    def _tell_skipped(self, call: Call) -> None:
        """Warn of what was left out of a request, once in the life of the Session."""
        kinds = call.request.skipped[:MAX_SKIPPED]
        if kinds and not self.skipped:
            emit("items.skipped", place=self.place, request=call.request_id, kinds=", ".join(kinds))
        self.skipped.update(dict.fromkeys(kinds[: MAX_SKIPPED - len(self.skipped)]))

    def _undelivered(self, digest: bytes) -> Call | None:
        """The newest call of this body that is in flight, or done well and never received.

        A reply is kept until something builds on it or on its parent.
        """
        later: list[Call] = []
        for call in reversed(self.calls):
            if call.request.digest != digest:
                later.append(call)
                continue
            if not call.done.is_set():
                return None if call.scope.cancel_called else call
            node = call.node
            if node is None or call.is_delivered or node.children:
                return None
            siblings = [other.node for other in later if other.node is not None and other.node is not node]
            return None if any(sibling.parent is node.parent for sibling in siblings) else call
        return None

    # --- evidence ---------------------------------------------------------------------------------------------

    def report(self) -> SessionReport:
        """Plain values about the Session so far."""
        return SessionReport(
            place=self.place,
            seconds=trio.current_time() - self.started_s,
            n_requests=len(self.calls),
            n_attempts=sum(len(call.attempts) for call in self.calls),
            n_aborted=self.n_aborted,
            oldest_version=self._oldest_version(),
            n_restored=self.forest.n_restored,
            n_shared_tokens=self._n_shared_tokens,
            flags=dict(self.flags),
            requests=tuple(call.to_json() for call in self.calls),
            state_hashes=tuple(node.state.hex() for node in self.forest.nodes),
        )

    def _oldest_version(self) -> WeightVersion:
        """The weights that served when its first attempt was dispatched; those of now where there was none."""
        attempts = (attempt for call in self.calls for attempt in call.attempts)
        first = next(attempts, None)
        return self.shared.backend.weight_version if first is None else first.version

    def debug_state(self, *, forest: bool) -> JsonObject:
        """State for `/debug_state`: place, age, requests; with `forest`, also `nodes` and `leaves` (docs/forest.md)."""
        out: JsonObject = {
            "place": self.place,
            "try": self.n_try,
            "mode": self.mode,
            "age_s": trio.current_time() - self.started_s,
            "leased": self.lease.is_set(),
            "parked": not self.may_generate,
            "protected": self.is_protected,
            "n_aborted": self.n_aborted,
            "budget_remaining_s": self.budget.remaining_s,
            "skipped": list(self.skipped),
            "requests": [call.to_json() for call in self.calls],
        }
        return {**out, **forest_json(self.forest)} if forest else out
