"""The servers of a run and which of them an attempt goes to. Who starts, watches and ends them is elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import trio
from attrs import define, field, frozen

from relax_trio.backend.sglang.client import MemoryTag, PauseMode, Served, SGLangClient
from relax_trio.backend.sglang.wire import ServerInfo
from relax_trio.errors import BackendUnavailable
from relax_trio.events import emit
from relax_trio.ids import WeightVersion
from relax_trio.sync.gate import Gate

Routing = Literal["least_loaded", "session"]


@frozen(kw_only=True)
class LoadedAdapter:
    """An adapter on a server: its name there, and the weight version that it is."""

    name: str
    version: WeightVersion


@define(eq=False, kw_only=True)
class Server:
    """One server, for as long as it is the same process.

    Attributes:
      name: public name, e.g. "SGLang server 0".
      info: as it told before it was admitted.
      has_spans: its answers tell the version of each token.
      n_legs: attempts that are on it now.
      generating: shut while it generates nothing although it is well: paused, or loading weights.
      n_holds: how often that was so, for those who looked away meanwhile.
      paused: how it is paused for longer than an update of its weights takes; None: it is not.
      adapter: the one that requests name; None: they are for the weights as they are.
      served: the weights as it told when it was given some last; None: not by this run yet.
      unused_adapters: names of those that are to be unloaded.
      released: memory that it has given up for a while.
      asking: held while it is asked for its health, which may make it generate.
      doubted: set while it is not known whether it still lives: a connection to it broke.
      left_behind: names of legs that were on it when it was lost.
      lost: why it is gone, None while it serves.
      gone: set when it is lost.
    """

    name: str
    client: SGLangClient
    info: ServerInfo
    has_spans: bool
    n_legs: int = 0
    generating: Gate = field(factory=Gate)
    n_holds: int = 0
    paused: PauseMode | None = None
    adapter: LoadedAdapter | None = None
    served: Served | None = None
    unused_adapters: list[str] = field(factory=list)
    released: set[MemoryTag] = field(factory=set)
    asking: trio.Lock = field(factory=trio.Lock)
    doubted: trio.Event = field(factory=trio.Event)
    left_behind: list[str] = field(factory=list)
    lost: str | None = None
    gone: trio.Event = field(factory=trio.Event)
    _scopes: set[trio.CancelScope] = field(factory=set)
    _idle: trio.Event = field(factory=trio.Event)

    def hold(self, reason: str) -> None:
        """From now on it generates nothing."""
        self.generating.shut(reason)
        self.n_holds += 1

    def release(self) -> None:
        """The opposite of `hold`, while it is not paused."""
        if self.paused is None:
            self.generating.open()

    def enter(self) -> trio.CancelScope:
        """A scope around a leg, cancelled when the server is lost."""
        scope = trio.CancelScope()
        self._scopes.add(scope)
        self.n_legs += 1
        return scope

    def leave(self, scope: trio.CancelScope) -> None:
        """The leg is over."""
        self._scopes.remove(scope)
        self.n_legs -= 1
        if not self.n_legs:
            self._idle.set()
            self._idle = trio.Event()

    async def wait_idle(self) -> None:
        """Wait until no leg is on it. Cancellation: safe."""
        while self.n_legs:
            await self._idle.wait()

    @contextmanager
    def until_gone(self) -> Iterator[None]:
        """Leave the block once the server is lost: one that hangs may never answer."""
        scope = trio.CancelScope()
        self._scopes.add(scope)
        if self.lost is not None:
            scope.cancel(reason=self.lost)
        try:
            with scope:
                yield
        finally:
            self._scopes.remove(scope)

    def lose(self, reason: str) -> None:
        """It is gone: whoever waits for an answer is told."""
        self.lost = reason
        self.gone.set()
        for scope in self._scopes:
            scope.cancel(reason=reason)


class Fleet:
    """Servers that take work.

    Args:
      routing: "least_loaded", or "session": always the same server for a Session, as long as it lives.
    """

    def __init__(self, routing: Routing = "least_loaded") -> None:
        self._routing = routing
        self._servers: dict[str, Server] = {}
        self._changed = trio.Event()
        self._closed: str | None = None

    @property
    def servers(self) -> list[Server]:
        """Those that take work now."""
        return list(self._servers.values())

    def admit(self, server: Server) -> None:
        """Let it have work from now on."""
        self._servers[server.name] = server
        emit("server.admitted", server=server.name, url=server.client.url, version=server.info.version)
        self._tell()

    def doubt(self, server: Server) -> None:
        """Let it have none until it is known whether it lives: whoever watches it asks at once."""
        server.doubted.set()

    def trust(self, server: Server) -> None:
        """It lives."""
        if server.doubted.is_set():
            server.doubted = trio.Event()
            self._tell()

    def retire(self, server: Server) -> None:
        """Let it have none any more; what runs on it goes on."""
        emit("server.retired", server=server.name, legs=server.n_legs)
        del self._servers[server.name]
        self._tell()

    def lose(self, server: Server, reason: str) -> None:
        """Let it have none any more; attempts on it fail as retryable. Idempotent."""
        if server.lost is None:
            emit("server.lost", server=server.name, legs=server.n_legs, reason=reason)
        if self._servers.get(server.name) is server:
            del self._servers[server.name]
        server.lose(reason)
        self._tell()

    def close(self, reason: str) -> None:
        """No server will come any more: whoever waits for one is told."""
        self._closed = reason
        self._tell()

    async def choose(self, session_key: str) -> Server:
        """The server for an attempt of a Session; waits while there is none but one may come.

        Raises:
          BackendUnavailable: none will come.

        Cancellation: safe.
        """
        await trio.lowlevel.checkpoint()
        while not (servers := [server for server in self._servers.values() if not server.doubted.is_set()]):
            if self._closed is not None:
                raise BackendUnavailable(self._closed)
            await self._changed.wait()
        if self._routing == "session":
            return max(servers, key=lambda server: _rank(session_key, server.name))
        return min(servers, key=lambda server: server.n_legs)

    def routing_key(self, session_key: str) -> str | None:
        """By which whatever stands between here and the servers keeps a Session together; None: it need not."""
        return session_key if self._routing == "session" else None

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def _rank(session_key: str, name: str) -> bytes:
    """Rendezvous hashing: a server that comes or goes moves only the Sessions that are or were its own."""
    return hashlib.blake2b(f"{session_key}\0{name}".encode(), digest_size=8).digest()
