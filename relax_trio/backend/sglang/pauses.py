"""Attempts held where they are, on servers that are paused: `Pausing` over SGLang servers.

A leg stays in its `/generate` call and goes on when its server does. On a server that can't be paused, because it is
older than those that the run began with or does not answer, legs are called back: their attempts wait here for the next
one, with what they have. Not covered: weights that change meanwhile (exchange), when it is done (the runtime).
"""

from __future__ import annotations

import trio

from relax_trio.backend.sglang.attempts import Attempts
from relax_trio.backend.sglang.client import CONTROL_S, PauseMode
from relax_trio.backend.sglang.fleet import Fleet, Server
from relax_trio.errors import BackendError
from relax_trio.events import emit

WATCHDOG_SHARE = 1 / 3
"""A server's watchdog takes a batch that is held in place for one that hangs, and ends the server."""


class Pauses:
    """The pause of a run's servers.

    Args:
      lock: held while weights change on them.
      mode: "retract": the server puts attempts back into its queue and frees their KV; "in_place": they keep it, for as
        long as its watchdog bears it.
    """

    _nursery: trio.Nursery

    def __init__(self, fleet: Fleet, attempts: Attempts, lock: trio.Lock, mode: PauseMode) -> None:
        self._fleet = fleet
        self._attempts = attempts
        self._lock = lock
        self._mode: PauseMode = mode
        self._is_on = False
        self._ended = trio.Event()
        self._to_continue: dict[Server, None] = {}
        self._left_behind: dict[Server, None] = {}

    @property
    def is_on(self) -> bool:
        """Whether no leg may begin for the sake of a pause."""
        return self._is_on

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look after servers that are paused, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    async def pause(self) -> None:
        """See `Pausing`. A server that is admitted later is not paused, and gets no work."""
        async with self._lock:
            if self._is_on:
                return
            self._is_on, self._ended = True, trio.Event()
            self._attempts.gate.shut("paused")
            async with trio.open_nursery() as nursery:
                for server in dict.fromkeys(self._fleet.servers + self._attempts.servers):
                    nursery.start_soon(self._pause, server, name=f"pause {server.name}")

    async def resume(self) -> None:
        """See `Pausing`. A server that does not answer is doubted, and told once more at the end of the run."""
        async with self._lock:
            if not self._is_on:
                return
            async with trio.open_nursery() as nursery:
                for server in tuple(self._to_continue):
                    nursery.start_soon(self._resume, server, name=f"continue {server.name}")
            self._is_on = False
            self._attempts.gate.open()
            self._ended.set()

    async def wait_ended(self) -> None:
        """Return at a moment when no pause is on. Cancellation: safe."""
        while self._is_on:
            await self._ended.wait()

    async def say_goodbye(self) -> None:
        """Nobody's server stays paused when the run ends, one that was lost meanwhile included."""
        async with trio.open_nursery() as nursery:
            for server in self._to_continue | self._left_behind:
                nursery.start_soon(self._say_goodbye, server, name=f"continue {server.name}")

    async def _pause(self, server: Server) -> None:
        if server.has_spans and await self._is_paused(server):
            if server.paused == "in_place":
                self._nursery.start_soon(self._relieve, server, self._ended, name=f"watchdog of {server.name}")
            return
        with trio.move_on_after(CONTROL_S):
            await self._attempts.clear(server, abort=True)

    async def _is_paused(self, server: Server) -> bool:
        """Tell a server to pause; whether it does."""
        self._to_continue[server] = None  # before it is told: its answer may get lost
        server.paused = self._mode
        server.hold("paused")
        try:
            await server.client.pause(self._mode)
        except BackendError as exc:
            emit("server.pause_failed", server=server.name, error=str(exc))
            self._let_go(server)
            self._fleet.doubt(server)
            return False
        return True

    async def _relieve(self, server: Server, ended: trio.Event) -> None:
        """Have attempts that are held in place put back, before the server's watchdog finds them."""
        seconds = server.info.watchdog_s * WATCHDOG_SHARE
        with trio.move_on_after(seconds):
            await ended.wait()
        async with self._lock:
            if ended.is_set() or server.lost is not None:
                return
            try:
                await server.client.pause("retract")
            except BackendError as exc:
                emit("server.pause_failed", server=server.name, error=str(exc))
                self._fleet.doubt(server)
            else:
                server.paused = "retract"
                emit("server.pause_retracted", server=server.name, seconds=seconds)

    async def _resume(self, server: Server) -> None:
        if server.released:
            return  # without memory it can't go on: the run ends, and it does
        try:
            await server.client.resume()
        except BackendError as exc:
            self._left_behind[server] = None
            if server.lost is None:
                emit("server.resume_failed", server=server.name, error=str(exc))
                self._fleet.doubt(server)
        else:
            self._left_behind.pop(server, None)
        self._to_continue.pop(server, None)
        self._let_go(server)

    async def _say_goodbye(self, server: Server) -> None:
        await self._resume(server)
        await server.client.aclose()  # closed by its keeper before, and opened again by this

    def _let_go(self, server: Server) -> None:
        server.paused = None
        server.release()
