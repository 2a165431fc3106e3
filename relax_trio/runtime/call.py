"""The handle of one accepted model request, shared by its front half (HTTP) and its back half (Session)."""

from __future__ import annotations

import math

import outcome
import trio
from attrs import define, evolve, field

from relax_trio.data.json import JsonObject
from relax_trio.data.request import CanonicalRequest, Completion
from relax_trio.errors import ProtocolError
from relax_trio.forest.node import Node
from relax_trio.ids import RequestId, Rid, WeightVersion
from relax_trio.sync.gate import Gate

Result = outcome.Value[Completion] | outcome.Error


@define(eq=False, kw_only=True)
class AttemptRecord:
    """What is remembered of one backend attempt, for views and dumps.

    Attributes:
      version: served when it was dispatched.
      is_paused: it is, in the backend, where it was when a step closed.
      n_pauses: pauses that it came through.
      went_round: it was aborted before its turn was complete.
    """

    rid: Rid
    version: WeightVersion
    started_s: float
    ended_s: float | None = None
    finish: str | None = None
    n_tokens: int = 0
    is_paused: bool = False
    n_pauses: int = 0
    went_round: bool = False

    @property
    def n_interruptions(self) -> int:
        """How often it kept its turn from going on when a step closed."""
        return self.n_pauses + self.is_paused + self.went_round

    def to_json(self) -> JsonObject:
        """Plain form for `/debug_state` and dumps."""
        return {
            "rid": self.rid,
            "seconds": None if self.ended_s is None else self.ended_s - self.started_s,
            "finish": self.finish,
            "n_tokens": self.n_tokens,
            "n_pauses": self.n_pauses,
            "version": self.version,
        }


@define(eq=False, kw_only=True)
class Flight:
    """An attempt while the backend has it.

    Attributes:
      scope: cancelled when an abort was not answered in time; what the backend had is lost then.
      landed: set when the backend has given it back, whatever it returned.
    """

    rid: Rid
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    landed: trio.Event = field(factory=trio.Event)


@define(eq=False, kw_only=True)
class Call:
    """One model request from acceptance to its result.

    Attributes:
      request: what was asked; its messages only until it is settled.
      scope: the back half's scope; its deadline is the retry grace of a client that left.
      begun: set once the request was matched, encoded and found to fit, or is done.
      done: set exactly once, by `settle`.
      node: the committed response, None until then.
      is_delivered: the reply's last byte went out without a disconnect seen.
      flight: the attempt that the backend has now.
      waiting_for: what the back half waits for now, for views: "encoding", "lease", "gate", "admission", "permit",
        "backend", "paused" (in the backend), "commit".
    """

    request_id: RequestId
    request: CanonicalRequest
    grace_s: float
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    begun: trio.Event = field(factory=trio.Event)
    done: trio.Event = field(factory=trio.Event)
    accepted_s: float = field(factory=trio.current_time)
    settled_s: float | None = None
    node: Node | None = None
    is_delivered: bool = False
    attempts: list[AttemptRecord] = field(factory=list)
    flight: Flight | None = None
    waiting_for: str = "encoding"
    _n_holds: int = 1
    _let_go: Gate = field(factory=lambda: Gate(shut="a front half holds the call"))
    _result: Result | None = None

    @property
    def result(self) -> Result | None:
        """The outcome, None while the call lives."""
        return self._result

    def settle(self, result: Result) -> None:
        """Record the outcome and wake whoever waits. Called exactly once, by the Session."""
        assert self._result is None, f"{self.request_id} was settled twice"
        self._result = result
        self.request = evolve(self.request, messages=())  # kept, they would be the square of a long history
        self.settled_s = trio.current_time()
        self.begun.set()
        self.done.set()

    async def wait_begun(self) -> None:
        """Wait until an answer can be begun with status 200, and raise where it can't.

        Raises:
          ProtocolError: the request was refused before it began.

        Cancellation: safe.
        """
        await self.begun.wait()
        if isinstance(self._result, outcome.Error):
            await self.wait_done()

    async def wait_done(self) -> Completion:
        """Wait for the committed turn.

        Raises:
          ProtocolError: the request was refused, failed, or its Session ended.

        Cancellation: safe; the call goes on until `detach` and the grace.
        """
        await self.done.wait()
        assert self._result is not None
        if isinstance(self._result, outcome.Error):
            error = self._result.error
            assert isinstance(error, ProtocolError)
            raise error.with_traceback(None)
        return self._result.value

    def attach(self) -> None:
        """One more front half holds the call: the grace ends, if it has not run out."""
        self._n_holds += 1
        self._let_go.shut("a front half holds the call again")
        self.scope.deadline = math.inf

    def detach(self) -> None:
        """A client left before its last byte; when nobody holds the call any more, its grace begins."""
        self._release()
        if not self._n_holds and not self.done.is_set():
            self.scope.deadline = trio.current_time() + self.grace_s

    def delivered(self) -> None:
        """The last byte of the reply went to the transport and no disconnect had been seen."""
        self._release()
        self.is_delivered = True
        if self.node is not None:
            self.node.delivered = True

    def note_pause(self) -> None:
        """Its attempt, if the backend has one, is paused there."""
        if self.flight is not None:
            self.attempts[-1].is_paused = True
            self.waiting_for = "paused"

    def note_resume(self) -> None:
        """Its attempt goes on, if it was paused; what came back in the pause had ended before."""
        if self.attempts and self.attempts[-1].is_paused:
            self.attempts[-1].is_paused = False
            self.attempts[-1].n_pauses += 1
            self.waiting_for = "backend"

    async def wait_let_go(self) -> None:
        """Wait until every front half has delivered its reply or lost its client. Cancellation: safe."""
        await self._let_go.wait_open()

    def _release(self) -> None:
        self._n_holds -= 1
        if not self._n_holds:
            self._let_go.open()

    def to_json(self) -> JsonObject:
        """Plain form for `/debug_state` and dumps."""
        now = trio.current_time()
        state = "done" if self.done.is_set() else self.waiting_for
        return {
            "id": self.request_id,
            "state": state,
            "age_s": (self.settled_s if self.settled_s is not None else now) - self.accepted_s,
            "delivered": self.is_delivered,
            "node": None if self.node is None else self.node.id,
            "attempts": [attempt.to_json() for attempt in self.attempts],
        }
