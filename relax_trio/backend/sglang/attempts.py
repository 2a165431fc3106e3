"""Attempts on their way through SGLang servers: leg after leg, called back, resumed.

An attempt's `/generate` call lives in the nursery of `run`, not in its caller: a caller that goes away leaves a call
that is aborted, again and again, until the server has answered it, so that the server holds nothing nobody waits for.
Not covered: what is asked and answered (wire), which servers there are (fleet), why weights change (backend).
"""

from __future__ import annotations

import secrets
from array import array
from itertools import count

import outcome
import trio

from relax_trio.backend.base import Attempt, AttemptResult
from relax_trio.backend.sglang import wire
from relax_trio.backend.sglang.adapters import check_version
from relax_trio.backend.sglang.fleet import Fleet, Server
from relax_trio.backend.sglang.flight import Flight, LegInFlight
from relax_trio.backend.sglang.images import NO_IMAGES, ImagePrompts
from relax_trio.backend.sglang.stops import Decode, cut_at_stop
from relax_trio.errors import BackendError, BackendProtocolError, BackendUnavailable
from relax_trio.events import emit
from relax_trio.ids import Rid
from relax_trio.sync.gate import Gate

ABORT_AFTER_S = 0.05
"""An abort that overtakes its request inside the server is lost for good, so it is not sent right behind it."""

ABORT_REPEAT_S = 0.5
_MAX_EMPTY_LEGS = 3


class Attempts:
    """Every attempt of a run, from its call to its result.

    Args:
      fleet: the servers.
      names_sessions: requests carry the Session's name.
      decode: token ids → text, special tokens included; needed for stop strings.
      images: what servers are sent of prompts with images; None: there are none.
    """

    def __init__(
        self, fleet: Fleet, *, names_sessions: bool, decode: Decode | None, images: ImagePrompts | None = None
    ) -> None:
        self.gate = Gate()
        """Shut while no leg may begin."""
        self._fleet = fleet
        self._names_sessions = names_sessions
        self._decode = decode
        self._images = images or NO_IMAGES
        self._is_serving = False
        self._named: dict[Rid, Flight] = {}
        self._airborne: set[Flight] = set()
        self._legs: set[LegInFlight] = set()
        self._unanswered: list[LegInFlight] = []
        self._rids = count(1)
        # Another run may use the same servers, and there a rid is taken for every longer one that begins with it.
        self._run_tag = secrets.token_hex(4)

    @property
    def is_serving(self) -> bool:
        """Whether attempts can be flown now."""
        return self._is_serving

    @property
    def named(self) -> dict[Rid, Flight]:
        """Those that somebody waits for."""
        return self._named

    @property
    def n_airborne(self) -> int:
        """Attempts that have not ended, waited for or not."""
        return len(self._airborne)

    @property
    def n_running(self) -> int:
        """Those that are on a server now."""
        return len(self._legs)

    @property
    def servers(self) -> list[Server]:
        """Those that one of them is on now, and maybe no other comes to."""
        return list({leg.server: None for leg in self._legs})

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the calls until cancelled.

        Cancellation: attempts under way end with BackendUnavailable; `say_goodbye` tells the servers.
        """
        try:
            async with trio.open_nursery() as self._nursery:
                self._is_serving = True
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._is_serving = False

    async def fly(self, attempt: Attempt) -> AttemptResult:
        """Run an attempt to its finish or abort; see `Backend.generate`.

        Cancellation: acts at once; the server is told until it holds the attempt no more.
        """
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

    def call_back(self, rid: Rid) -> None:
        """Ask for what the attempt has; repeated until the server has answered. An unknown rid is no error."""
        flight = self._named.get(rid)
        if flight is not None and flight.ending is None:
            self._call_back(flight)

    async def wait_ended(self, session_key: str) -> None:
        """Wait until the attempts of a Session that were under way have ended."""
        for flight in [flight for flight in self._airborne if flight.attempt.session_key == session_key]:
            await flight.done.wait()

    async def clear(self, server: Server, *, abort: bool) -> None:
        """Wait until the legs that are on `server` now have landed; with `abort` they are called back first."""
        legs = [leg for leg in self._legs if leg.server is server]
        for leg in legs if abort else ():
            self._call_back_leg(leg)
        for leg in legs:
            await leg.landed.wait()

    async def say_goodbye(self) -> None:
        """Servers that live on must not go on with attempts of a run that ended."""
        legs = [leg for leg in self._unanswered if leg.server.lost is None]
        async with trio.open_nursery() as nursery:
            for leg in legs:
                nursery.start_soon(self._abort_once, leg.server, leg.rid, name=f"abort {leg.rid}")
        for server in {leg.server for leg in legs}:
            await server.client.aclose()  # closed by its keeper before, and opened again by this

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
            while server is None or not self.gate.is_open:
                await self.gate.wait_open()
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
                body = await self._body(flight, leg)
                routing_key = self._fleet.routing_key(attempt.session_key)
                answer = await server.client.generate(body, f"attempt {attempt.rid}", routing_key)
                check_version(answer, leg.adapter, f"attempt {attempt.rid}")
                return leg.is_called_back, self._cut(flight, answer)
            server.left_behind.append(leg.rid)
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

    async def _body(self, flight: Flight, leg: LegInFlight) -> bytes:
        """The body of the leg's call; with images it is megabytes, and is put together in a worker thread."""
        attempt, ids = flight.attempt, flight.attempt.token_ids + flight.token_ids
        n_left = flight.n_left

        def put_together(ids: array[int]) -> bytes:
            if attempt.images:
                ids = self._images.wire_ids(ids, attempt.images, f"attempt {attempt.rid}")
            return wire.generate_body(
                leg.rid,
                ids,
                attempt.sampling,
                n_left,
                attempt.session_key if self._names_sessions else None,
                images=self._images.wire_images(attempt.images),
                forbidden_ids=self._images.forbidden_ids,
                routing_key=self._fleet.routing_key(attempt.session_key),
                adapter=None if leg.adapter is None else leg.adapter.name,
            )

        if not attempt.images:
            return put_together(ids)
        body = await trio.to_thread.run_sync(put_together, ids)
        leg.sent_s = trio.current_time()
        return body

    def _cut(self, flight: Flight, leg: wire.Leg) -> wire.Leg:
        """End the leg where it completes a stop string that began before it."""
        attempt = flight.attempt
        if len(leg.token_ids) > flight.n_left:
            raise BackendProtocolError(f"attempt {attempt.rid}: {len(leg.token_ids)} tokens instead of {flight.n_left}")
        n_sent = len(attempt.token_ids) + len(flight.token_ids) if attempt.images else None
        self._images.check_answer(leg, n_sent, f"attempt {attempt.rid}")
        if not attempt.sampling.stop or self._decode is None:
            return leg
        earlier = attempt.token_ids[attempt.response_start :] + flight.token_ids
        cut = cut_at_stop(self._decode, earlier, leg.token_ids, attempt.sampling.stop)
        return leg if cut is None else leg.ended_at(*cut)

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
