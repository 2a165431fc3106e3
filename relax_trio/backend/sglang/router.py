"""The workers of a router: asked for at intervals, and followed as servers for as long as the router has them.

Attempts, aborts and updates go to the workers themselves: a router forwards none but the first, and of those only
the fields that it knows.
"""

from __future__ import annotations

from collections.abc import Mapping

import trio
from attrs import define, field

from relax_trio.backend.lanes import Lanes
from relax_trio.backend.sglang.external import ExternalServer, ExternalServers
from relax_trio.backend.sglang.fleet import Fleet
from relax_trio.backend.sglang.keeper import Admit
from relax_trio.backend.sglang.snapshots import Snapshots
from relax_trio.backend.sglang.workers import Worker, ask_workers
from relax_trio.errors import BackendError, BackendUnavailable, ConfigError, WeightSyncError
from relax_trio.events import emit

ROUTER_INTERVAL_S = 5.0
_FIRST_INTERVAL_S = 1.0


@define(eq=False)
class RouterServers:
    """The servers behind one router, as a `Keeper`.

    Args:
      url: of the router.
      interval_s: between two looks at its workers.
    """

    common: ExternalServers
    url: str
    interval_s: float = ROUTER_INTERVAL_S
    _model: str | None = None
    _scopes: dict[str, trio.CancelScope] = field(factory=dict)
    _retiring: set[str] = field(factory=set)
    _refused: set[str] = field(factory=set)
    _problem: str | None = None

    async def keep(self, fleet: Fleet, snapshots: Snapshots, admit: Admit, started: trio.Event) -> None:
        """See `Keeper`. A worker that the router has no more gets no more work; what runs on it ends there.

        A worker that the router calls unhealthy is not taken up. One that is followed already is judged by its own
        health: the router asks once a minute, and takes a server that is paused for a sick one.

        Raises:
          BackendUnavailable: the router does not answer or has no worker at the start.
          ConfigError: it is no router, wants an API key, or has workers that this run can't use.

        Cancellation: the servers are left alone.
        """
        lanes = Lanes(self.url, 1)
        try:
            workers = await self._first_workers(lanes)
            async with trio.open_nursery() as nursery:
                while True:
                    for url in self._new(workers):
                        self._scopes[url] = trio.CancelScope()
                        nursery.start_soon(self._follow, url, fleet, snapshots, admit, started, name=f"worker {url}")
                    for url in self._scopes.keys() - workers.keys() - self._retiring:
                        self._retiring.add(url)
                        nursery.start_soon(self._retire, url, self._scopes[url], fleet, name=f"retiring worker {url}")
                    await trio.sleep(self.interval_s)
                    workers = await self._workers(lanes, workers)
        finally:
            await lanes.aclose()

    async def _first_workers(self, lanes: Lanes) -> Mapping[str, Worker]:
        """The workers, once there is a healthy one. A router has none yet when it begins to answer."""
        problem = "it does not answer"
        with trio.move_on_after(self.common.start_timeout_s):
            while True:
                try:
                    workers = await ask_workers(lanes, f"router {self.url}")
                except BackendUnavailable as exc:
                    problem = str(exc)
                except BackendError as exc:
                    raise ConfigError(
                        f"--sglang-router-ip and --sglang-router-port must name an SGLang router that asks for no API "
                        f"key: {exc}; a server is named by --sglang-server"
                    ) from exc
                else:
                    self._refuse_unfit(workers)
                    if any(worker.is_healthy for worker in workers.values()):
                        return workers
                    problem = f"{len(workers)} workers, none of them healthy" if workers else "it has none"
                await trio.sleep(min(_FIRST_INTERVAL_S, self.interval_s))
        raise BackendUnavailable(f"router {self.url}: no worker within {self.common.start_timeout_s:g} s: {problem}")

    def _refuse_unfit(self, workers: Mapping[str, Worker]) -> None:
        for worker in workers.values():
            if (reason := self._unfit(worker)) is not None:
                raise ConfigError(
                    f"router {self.url}: worker {worker.url} can't be used: {reason}; attempts and weights go to each "
                    f"worker itself, so --sglang-server must name those that are meant"
                )

    def _unfit(self, worker: Worker) -> str | None:
        if worker.unfit is None and worker.model is not None:
            self._model = self._model or worker.model
            if worker.model != self._model:
                return f"it serves {worker.model!r}, and another serves {self._model!r}"
        return worker.unfit

    def _new(self, workers: Mapping[str, Worker]) -> list[str]:
        """Those to be followed from now on; one that can't be is told of once."""
        new = []
        self._refused &= workers.keys()
        for worker in workers.values():
            if worker.url in self._scopes or worker.url in self._refused or not worker.is_healthy:
                continue
            if (reason := self._unfit(worker)) is None:
                new.append(worker.url)
            else:
                self._refuse(worker.url, reason)
        return new

    def _refuse(self, url: str, reason: str) -> None:
        """Take no more notice of a worker for as long as it is listed."""
        self._refused.add(url)
        emit("router.worker_refused", router=self.url, worker=url, reason=reason)

    async def _workers(self, lanes: Lanes, known: Mapping[str, Worker]) -> Mapping[str, Worker]:
        """The workers now; those that were known where the router does not answer, which is told of when it begins."""
        try:
            workers = await ask_workers(lanes, f"router {self.url}")
        except BackendError as exc:
            if self._problem is None:
                emit("router.unreachable", router=self.url, error=str(exc))
            self._problem = str(exc)
            return known
        self._problem = None
        return workers

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
            except (ConfigError, WeightSyncError) as exc:
                if not started.is_set():
                    raise
                self._refuse(url, str(exc))
        for gone in [server for server in fleet.servers if server.client.url == url]:
            fleet.lose(gone, f"router {self.url} has it no more")
        del self._scopes[url]
        self._retiring.discard(url)

    async def _retire(self, url: str, following: trio.CancelScope, fleet: Fleet) -> None:
        """Let a worker end what it has, and follow it no more."""
        for server in [server for server in fleet.servers if server.client.url == url]:
            fleet.retire(server)
            await server.wait_idle()
            fleet.lose(server, f"router {self.url} has it no more")
        following.cancel(reason=f"router {self.url} has no worker {url} any more")
