"""SGLang servers that somebody else runs: named by URL or found through a router, followed while they come and go."""

from __future__ import annotations

import json

import trio
from attrs import field, frozen

from relax_trio.backend.lanes import Lanes
from relax_trio.backend.sglang.client import SGLangClient
from relax_trio.backend.sglang.connect import connect
from relax_trio.backend.sglang.fleet import Fleet
from relax_trio.backend.sglang.health import watch_health
from relax_trio.backend.sglang.keeper import Admit
from relax_trio.backend.sglang.snapshots import Snapshots
from relax_trio.data.json import JsonValue, parse_json
from relax_trio.errors import BackendError, BackendProtocolError, BackendUnavailable
from relax_trio.events import emit

ROUTER_INTERVAL_S = 5.0
_ROUTER_S = 5.0


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

        Cancellation: the server is left alone.
        """
        client = SGLangClient(self.url, f"SGLang server {self.url}", self.common.max_inflight)
        try:
            while True:
                try:
                    server = await connect(client, self.common.start_timeout_s)
                    await admit(server, None)
                except BackendUnavailable as exc:
                    if not started.is_set():
                        raise
                    emit("server.unreachable", server=client.name, error=str(exc))
                    continue
                started.set()
                fleet.lose(server, await watch_health(server, fleet, self.common.health_timeout_s))
        finally:
            await client.aclose()


@frozen
class RouterServers:
    """The workers of a router: asked for at intervals; attempts then go to the workers themselves.

    So an abort reaches the worker that has the attempt, and an update reaches all.
    """

    common: ExternalServers
    url: str
    _scopes: dict[str, trio.CancelScope] = field(factory=dict)

    async def keep(self, fleet: Fleet, snapshots: Snapshots, admit: Admit, started: trio.Event) -> None:
        """See `Keeper`.

        Raises:
          BackendUnavailable: the router does not answer or has no worker at the start.

        Cancellation: the servers are left alone.
        """
        lanes = Lanes(self.url, 1)
        with trio.move_on_after(self.common.start_timeout_s) as starting:
            while not await self._workers(lanes):  # noqa: ASYNC110 - a router tells nobody that it has a worker
                await trio.sleep(1.0)
        if starting.cancelled_caught:
            raise BackendUnavailable(f"router {self.url}: no worker within {self.common.start_timeout_s:g} s")
        async with trio.open_nursery() as nursery:
            while True:
                workers = await self._workers(lanes)
                for url in workers - self._scopes.keys():
                    nursery.start_soon(self._follow, url, fleet, snapshots, admit, started, name=f"worker {url}")
                    self._scopes[url] = trio.CancelScope()
                for url in self._scopes.keys() - workers if workers else ():
                    self._scopes[url].cancel(reason=f"router {self.url} has no worker {url} any more")
                await trio.sleep(ROUTER_INTERVAL_S)

    async def _follow(self, url: str, fleet: Fleet, snapshots: Snapshots, admit: Admit, started: trio.Event) -> None:
        """One worker, while the router has it."""
        server = ExternalServer(self.common, url)
        with self._scopes[url]:
            try:
                await server.keep(fleet, snapshots, admit, started)
            except BackendUnavailable as exc:
                if len(self._scopes) == 1:
                    raise
                emit("server.unreachable", server=url, error=str(exc))
        for gone in [server for server in fleet.servers if server.client.url == url.rstrip("/")]:
            fleet.lose(gone, f"router {self.url} has it no more")
        del self._scopes[url]

    async def _workers(self, lanes: Lanes) -> set[str]:
        """URLs of the workers; none where the router does not answer."""
        try:
            with trio.move_on_after(_ROUTER_S):
                response = await lanes.request("GET", "/workers")
                if response.status_code == 200:
                    return read_workers(response.content, self.url)
        except BackendError as exc:
            emit("router.unreachable", router=self.url, error=str(exc))
        return set()


def read_workers(body: bytes, router: str) -> set[str]:
    """URLs in the answer to `/workers`: objects with `url`, without those that the router calls unhealthy.

    Raises:
      BackendProtocolError: it is something else.
    """
    try:
        value = parse_json(body)
    except ValueError as exc:
        raise BackendProtocolError(f"router {router}: /workers is no JSON: {exc}") from exc
    listed: JsonValue = value.get("workers") or value.get("urls") if isinstance(value, dict) else value
    if not isinstance(listed, list):
        raise BackendProtocolError(f"router {router}: /workers lists no workers: {json.dumps(value)[:200]}")
    urls: set[str] = set()
    for worker in listed:
        if isinstance(worker, str):
            urls.add(worker)
        elif isinstance(worker, dict) and isinstance(url := worker.get("url"), str):
            healthy = worker.get("is_healthy", worker.get("healthy", True))
            urls |= {url} if healthy else set()
    return urls
