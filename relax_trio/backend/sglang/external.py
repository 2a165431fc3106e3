"""SGLang servers that somebody else runs, followed while they come and go."""

from __future__ import annotations

import trio
from attrs import frozen

from relax_trio.backend.sglang.client import SGLangClient
from relax_trio.backend.sglang.connect import connect
from relax_trio.backend.sglang.fleet import Fleet, Server
from relax_trio.backend.sglang.health import watch_health
from relax_trio.backend.sglang.keeper import Admit
from relax_trio.backend.sglang.snapshots import Snapshots
from relax_trio.errors import BackendUnavailable
from relax_trio.events import emit


@frozen(kw_only=True)
class ExternalServers:
    """How servers of others are followed.

    Attributes:
      start_timeout_s: until the first of them generates.
      health_timeout_s: one that is not well for so long gets no work until it is well again.
    """

    start_timeout_s: float = 600.0
    health_timeout_s: float = 30.0
    max_inflight: int = 1024


@frozen
class ExternalServer:
    """One server by its URL."""

    common: ExternalServers
    url: str

    async def keep(self, fleet: Fleet, snapshots: Snapshots, admit: Admit, started: trio.Event) -> None:
        """See `Keeper`.

        Raises:
          BackendUnavailable: it can't be reached at the start.
          ConfigError: it is a router.

        Cancellation: the server is left alone.
        """
        client = SGLangClient(self.url, f"SGLang server {self.url}", self.common.max_inflight)
        lost: Server | None = None
        try:
            while True:
                try:
                    server = await connect(client, self.common.start_timeout_s, lost=lost)
                    await admit(server, None)
                except BackendUnavailable as exc:
                    if not started.is_set():
                        raise
                    emit("server.unreachable", server=client.name, error=str(exc))
                    continue
                started.set()
                fleet.lose(server, await watch_health(server, fleet, self.common.health_timeout_s))
                lost = server
        finally:
            await client.aclose()
