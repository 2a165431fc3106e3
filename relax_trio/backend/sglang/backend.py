"""SGLang servers as a `Backend`: attempts on their way, called back, resumed; sessions closed; weights exchanged.

An attempt's `/generate` call lives in the nursery of `run`, not in its caller: a caller that goes away leaves a call
that is aborted, again and again, until the server has answered it, so that the server holds nothing nobody waits for.
Not covered: which servers there are (keepers), what is said to them (client, wire).
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Protocol

import outcome
import trio
from attrs import frozen

from relax_trio.backend.base import Attempt, AttemptResult, BackendLoad, WeightSource
from relax_trio.backend.refuse import refuse_unfit
from relax_trio.backend.sglang import wire
from relax_trio.backend.sglang.exchange import NewWeights, Recipe, Transfer, give_weights, recipe_for
from relax_trio.backend.sglang.fleet import Fleet, Routing, Server
from relax_trio.backend.sglang.flight import Flight, LegInFlight
from relax_trio.backend.sglang.snapshots import Snapshots
from relax_trio.backend.sglang.stops import Decode, cut_at_stop
from relax_trio.errors import BackendError, BackendProtocolError, BackendRejected, BackendUnavailable, WeightSyncError
from relax_trio.events import emit
from relax_trio.ids import Rid, WeightVersion
from relax_trio.sync.cleanup import cleanup_scope
from relax_trio.sync.gate import Gate

ABORT_AFTER_S = 0.05
"""An abort that overtakes its request inside the server is lost for good, so it is not sent right behind it."""

ABORT_REPEAT_S = 0.5
CLOSE_SESSION_S = 2.0
_GOODBYE_S = 3.0
_MAX_EMPTY_LEGS = 3


@frozen(kw_only=True)
class SGLangOptions:
    """How servers are used.

    Attributes:
      max_context_len: most tokens of prefix and completion, where that is less than what servers take.
      vocab_len: number of token ids of the model; one outside of it would kill the server.
      session_lifecycle: requests carry the Session's name, and servers are told when it ends.
      recipe, transfer: how weights change; see exchange.py.
    """

    max_context_len: int | None = None
    vocab_len: int | None = None
    routing: Routing = "least_loaded"
    session_lifecycle: bool = False
    recipe: Recipe = "auto"
    transfer: Transfer = "disk"


class Admit(Protocol):
    """Gives a server that is ready the current weights if it has others, and then work."""

    async def __call__(self, server: Server, has: WeightVersion | None) -> None:
        """Admit `server`.

        Args:
          has: the version that it was given by this run; None: only its own word is known, and another run may have
            called other weights by the same name.
        """
        ...


class Keeper(Protocol):
    """Starts or finds servers and follows their health."""

    async def keep(self, fleet: Fleet, snapshots: Snapshots, admit: Admit, started: trio.Event) -> None:
        """Keep servers in the fleet until cancelled; set `started` once the first is admitted.

        Raises:
          BackendUnavailable: no server can be had, or none any more.
        """
        ...


class SGLangBackend:
    """`Backend` over SGLang servers.

    Args:
      checkpoint: directory of the model the run begins with.
      version: its weight version.
      snapshot_dir: where later versions are written.
      keepers: where servers come from.
      options: how they are used.
      decode: token ids → text, special tokens included.
    """

    def __init__(
        self,
        checkpoint: Path,
        version: WeightVersion,
        *,
        snapshot_dir: Path,
        keepers: Iterable[Keeper],
        options: SGLangOptions | None = None,
        decode: Decode | None = None,
    ) -> None:
        self._options = options or SGLangOptions()
        self._snapshots = Snapshots(snapshot_dir, checkpoint, version)
        self._keepers = tuple(keepers)
        self._decode = decode
        self._fleet = Fleet(self._options.routing)
        self._gate = Gate()
        self._update_lock = trio.Lock()
        self._version = version
        self._max_context_len = self._options.max_context_len or 0
        self._is_serving = False
        self._named: dict[Rid, Flight] = {}
        self._airborne: set[Flight] = set()
        self._legs: set[LegInFlight] = set()
        self._unanswered: list[LegInFlight] = []
        self._rids = count(1)
        # Another run may use the same servers, and there a rid is taken for every longer one that begins with it.
        self._run_tag = secrets.token_hex(4)
        self.counts: Counter[str] = Counter()

    @property
    def max_context_len(self) -> int:
        """See `Backend`. Known once servers are."""
        return self._max_context_len

    @property
    def weight_version(self) -> WeightVersion:
        """See `Backend`."""
        return self._version

    @property
    def servers(self) -> list[Server]:
        """Servers that take work now."""
        return self._fleet.servers

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """See `Backend`.

        Raises:
          BackendUnavailable: no server can be had, at the start or any more; ends with the tail of its log.

        Cancellation: attempts under way get BackendUnavailable; own servers are ended, others are told to abort.
        """
        try:
            async with trio.open_nursery() as self._nursery:
                await self._start_keepers()
                self._is_serving = True
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._is_serving = False
            with cleanup_scope(_GOODBYE_S, "attempts on SGLang servers"):
                await self._say_goodbye()
            self._snapshots.remove()

    async def generate(self, attempt: Attempt) -> AttemptResult:
        """See `Backend`. Waits for a server while none is there but one is being started.

        Cancellation: acts at once; the server is told until it holds the attempt no more.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._is_serving:
            raise BackendUnavailable(f"attempt {attempt.rid}: the SGLang backend is not serving")
        refuse_unfit(
            attempt,
            running=self._named,
            max_context_len=self._max_context_len,
            vocab_len=self._options.vocab_len,
        )
        if attempt.sampling.stop and self._decode is None:
            raise BackendRejected(f"attempt {attempt.rid}: stop strings need a backend that was given a decoder")
        flight = self._named[attempt.rid] = Flight(attempt=attempt)
        self._airborne.add(flight)
        self._nursery.start_soon(self._fly, flight, name=f"attempt {attempt.rid}")
        try:
            await flight.done.wait()
        finally:
            del self._named[attempt.rid]
            if flight.ending is None:
                self._call_back(flight)
        assert flight.ending is not None, "set before its event"
        return flight.ending.unwrap()

    async def abort(self, rid: Rid) -> None:
        """See `Backend`. Returns at once; the abort is repeated until the server has answered."""
        flight = self._named.get(rid)
        if flight is not None and flight.ending is None:
            self._call_back(flight)
        await trio.lowlevel.checkpoint()

    async def update_weights(self, version: WeightVersion, source: WeightSource) -> None:
        """See `Backend`. No new attempt begins meanwhile; what happens to those under way is the recipe's business.

        Raises:
          WeightSyncError: the source doesn't fit; or a server refuses it, or refuses to flush its cache. Then servers
            may serve different versions, and the run must end.

        Cancellation: some servers may have the new weights and others not.
        """
        if not self._is_serving:
            raise WeightSyncError(f"weights {version!r}: the SGLang backend is not serving")
        async with self._update_lock:
            recipes = {server: recipe_for(server, self._options.recipe) for server in self._fleet.servers}
            await self._snapshots.publish(version, source)
            tensors = source.tensors if self._options.transfer == "tensor" else None
            new = NewWeights(version=version, path=self._snapshots.path, tensors=tensors)
            self._gate.shut(f"weights {version}")
            try:
                failures: list[WeightSyncError] = []
                async with trio.open_nursery() as nursery:
                    for server, recipe in recipes.items():
                        update = partial(self._update_server, server, new, recipe, failures)
                        nursery.start_soon(update, name=f"weights {version}")
                if failures:
                    raise failures[0]
                self._version = version
            finally:
                self._gate.open()
        emit("weights.updated", version=version, servers=len(recipes))

    async def close_session(self, session_key: str) -> None:
        """See `Backend`: tells every server, where the Session lifecycle is on. Failures are counted, and harmless.

        Cancellation: safe. Takes at most `CLOSE_SESSION_S`.
        """
        await trio.lowlevel.checkpoint()
        if not self._options.session_lifecycle or not self._is_serving:
            return
        servers = self._fleet.servers
        n_closed = self.counts["session/close"]
        with trio.move_on_after(CLOSE_SESSION_S):
            for flight in [flight for flight in self._airborne if flight.attempt.session_key == session_key]:
                await flight.done.wait()
            async with trio.open_nursery() as nursery:
                for server in servers:
                    nursery.start_soon(self._close_on, server, session_key, name=f"close session {session_key}")
        n_failed = len(servers) - (self.counts["session/close"] - n_closed)
        if n_failed > 0:
            emit("session.close_failed", session=session_key, servers=n_failed)
            self.counts["session/close_failure"] += n_failed

    def load(self) -> BackendLoad:
        """See `Backend`."""
        n_running = len(self._legs)
        return BackendLoad(
            n_running=n_running,
            n_waiting=len(self._airborne) - n_running,
            n_total_tokens=sum(server.info.max_total_tokens for server in self._fleet.servers),
            extra={f"agentic_kv/{name}": float(value) for name, value in self.counts.items()},
        )

    # --- attempts ---------------------------------------------------------------------------------------------

    async def _fly(self, flight: Flight) -> None:
        rid = flight.attempt.rid
        try:
            flight.settle(outcome.Value(await self._finish(flight)))
        except BackendError as exc:
            flight.settle(outcome.Error(exc))
        finally:
            flight.settle(outcome.Error(BackendUnavailable(f"attempt {rid}: the SGLang backend ended")))
            self._airborne.discard(flight)

    async def _finish(self, flight: Flight) -> AttemptResult:
        """Run legs until the attempt is finished or what it has is wanted."""
        n_empty = 0
        while (server := await self._server_for(flight)) is not None:
            called_back, leg = await self._fly_leg(flight, server)
            stop_ids = flight.attempt.sampling.stop_token_ids
            flight.keep(leg)
            if leg.finish == "stop" or (flight.token_ids and flight.token_ids[-1] in stop_ids):
                return flight.result("stop")
            if flight.n_left <= 0:
                return flight.result("length")
            if leg.finish == "abort" and flight.is_aborted:
                return flight.result("abort")
            # Called back for new weights, or ended by the server for reasons of its own: the rest comes with another.
            n_empty = 0 if leg.token_ids or called_back else n_empty + 1
            if n_empty == _MAX_EMPTY_LEGS:
                why = leg.message or f"it ended with {leg.finish!r} before its first token"
                raise BackendUnavailable(f"attempt {flight.attempt.rid}: {server.name} won't serve it: {why}")
        return flight.result("abort")

    async def _server_for(self, flight: Flight) -> Server | None:
        """A server to go to now; None: the attempt was aborted meanwhile. Nothing is waited for after it is chosen."""
        server = None
        with trio.CancelScope() as flight.waiting:
            if flight.is_aborted:
                return None
            while server is None or not self._gate.is_open:
                await self._gate.wait_open()
                server = await self._fleet.choose(flight.attempt.session_key)
        flight.waiting = None
        return None if flight.is_aborted else server

    async def _fly_leg(self, flight: Flight, server: Server) -> tuple[bool, wire.Leg]:
        """One `/generate` call; returns whether it was called back, and what it brought."""
        attempt = flight.attempt
        leg = flight.leg = LegInFlight(server=server, rid=f"{self._run_tag}-{next(self._rids)}-{attempt.rid};")
        self._legs.add(leg)
        scope = server.enter()
        try:
            with scope:
                answer = await server.client.generate(self._body(flight, leg), f"attempt {attempt.rid}")
                return leg.is_called_back, self._cut(flight, answer)
            raise BackendUnavailable(f"attempt {attempt.rid}: {server.name} is gone: {server.lost}")
        except BackendUnavailable:
            if server.lost is None:
                self._fleet.doubt(server)
                # a connection that broke does not end what it asked for
                self._nursery.start_soon(self._abort_once, server, leg.rid, name=f"abort {attempt.rid}")
            raise
        except trio.Cancelled:
            self._unanswered.append(leg)
            raise
        finally:
            server.leave(scope)
            self._legs.discard(leg)
            flight.leg = None
            leg.landed.set()

    def _body(self, flight: Flight, leg: LegInFlight) -> bytes:
        attempt = flight.attempt
        return wire.generate_body(
            leg.rid,
            attempt.token_ids + flight.token_ids,
            attempt.sampling,
            flight.n_left,
            attempt.session_key if self._options.session_lifecycle else None,
        )

    def _cut(self, flight: Flight, leg: wire.Leg) -> wire.Leg:
        """End the leg where it completes a stop string that began before it."""
        attempt = flight.attempt
        if len(leg.token_ids) > flight.n_left:
            raise BackendProtocolError(f"attempt {attempt.rid}: {len(leg.token_ids)} tokens instead of {flight.n_left}")
        if not attempt.sampling.stop or self._decode is None:
            return leg
        earlier = attempt.token_ids[attempt.response_start :] + flight.token_ids
        cut = cut_at_stop(self._decode, earlier, leg.token_ids, attempt.sampling.stop)
        return leg if cut is None else leg.ended_at(*cut)

    # --- calling back -----------------------------------------------------------------------------------------

    def _call_back(self, flight: Flight) -> None:
        """Somebody wants what the attempt has, or nobody wants it any more."""
        flight.call_back()
        if flight.leg is not None:
            self._call_back_leg(flight.leg)

    def _call_back_leg(self, leg: LegInFlight) -> None:
        if not leg.is_called_back and self._is_serving:
            leg.is_called_back = True
            self._nursery.start_soon(self._bring_back, leg, name=f"abort {leg.rid}")

    async def _bring_back(self, leg: LegInFlight) -> None:
        """Abort until the server has answered. While it is paused an abort could be lost, so that is waited for."""
        await trio.sleep_until(leg.sent_s + ABORT_AFTER_S)
        while not leg.landed.is_set():
            with trio.move_on_after(ABORT_REPEAT_S):
                await leg.server.generating.wait_open()
                await self._abort_once(leg.server, leg.rid)
                await leg.landed.wait()

    async def _abort_once(self, server: Server, rid: str) -> None:
        try:
            await server.client.abort(rid)
        except BackendError as exc:
            emit("attempt.abort_failed", rid=rid, server=server.name, error=str(exc))

    async def _say_goodbye(self) -> None:
        """Servers that live on must not go on with attempts of a run that ended."""
        legs = [leg for leg in self._unanswered if leg.server.lost is None]
        async with trio.open_nursery() as nursery:
            for leg in legs:
                nursery.start_soon(self._abort_once, leg.server, leg.rid, name=f"abort {leg.rid}")
        for server in {leg.server for leg in legs}:
            await server.client.aclose()  # closed by its keeper before, and opened again by this

    # --- servers and weights ----------------------------------------------------------------------------------

    async def _start_keepers(self) -> None:
        """Start every keeper and wait until each has its first server."""
        events = []
        for keeper in self._keepers:
            events.append(trio.Event())
            keep = partial(keeper.keep, self._fleet, self._snapshots, self._admit, events[-1])
            self._nursery.start_soon(keep, name="SGLang servers")
        for event in events:
            await event.wait()

    async def _admit(self, server: Server, has: WeightVersion | None) -> None:
        """See `Admit`."""
        async with self._update_lock:
            if has != self._snapshots.version:
                new = NewWeights(version=self._snapshots.version, path=self._snapshots.path)
                await give_weights(server, new, "drain")
            taken = server.info.max_context_len
            self._max_context_len = min(self._max_context_len or taken, taken)
            self._fleet.admit(server)

    async def _update_server(
        self, server: Server, new: NewWeights, recipe: Recipe, failures: list[WeightSyncError]
    ) -> None:
        legs = [leg for leg in self._legs if leg.server is server]
        if recipe == "abort":
            for leg in legs:
                self._call_back_leg(leg)
        if recipe in ("abort", "drain"):
            for leg in legs:
                await leg.landed.wait()
        if server.lost is None:
            try:
                await give_weights(server, new, recipe)
            except WeightSyncError as exc:
                failures.append(exc)

    async def _close_on(self, server: Server, session_key: str) -> None:
        try:
            await server.client.close_session(session_key)
        except BackendError:
            return  # counted by the caller
        self.counts["session/close"] += 1
