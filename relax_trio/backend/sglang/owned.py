"""SGLang servers that belong to the run: started through the warden, watched, started again, ended with it."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import trio
from attrs import define, frozen

from relax_trio.backend.sglang.client import SGLangClient
from relax_trio.backend.sglang.connect import connect
from relax_trio.backend.sglang.fleet import Fleet, Server
from relax_trio.backend.sglang.health import watch_health
from relax_trio.backend.sglang.keeper import Admit
from relax_trio.backend.sglang.snapshots import Snapshots
from relax_trio.errors import BackendUnavailable, ConfigError, boundary
from relax_trio.events import emit
from relax_trio.sync.process import Child, Warden

TERM_GRACE_S = 2.0
"""A server has nothing to save, and one with a stuck request ignores SIGTERM."""

EXIT_TOLD_S = 0.5
"""A process that died refuses connections a moment before its exit is told; then that is the reason."""

TAIL_BYTES = 4096

_HOST = "127.0.0.1"


@frozen(kw_only=True)
class OwnedServers:
    """What the servers of a run have in common.

    Attributes:
      python: the Python that has SGLang installed.
      args: flags of `sglang.launch_server`, as they are.
      gpus: for each server the GPUs it sees; empty: what this process sees.
      log_dir: gets a log for each server.
      max_restarts: of one server, in the whole run.
      start_timeout_s: from its start until it generates.
      health_timeout_s: a server that is not well for so long is ended and started again.
    """

    warden: Warden
    python: str
    args: tuple[str, ...]
    log_dir: Path
    gpus: tuple[str, ...] = ()
    max_restarts: int = 3
    start_timeout_s: float = 600.0
    health_timeout_s: float = 30.0
    max_inflight: int = 1024


@define(eq=False)
class _Life:
    """One process of a server.

    Attributes:
      server: the server that it is, once it generates.
      ended_by: why it ended; the first reason stands.
    """

    server: Server | None = None
    ended_by: str | None = None

    def end(self, reason: str, fleet: Fleet) -> None:
        """It takes no more work; what runs on it fails."""
        self.ended_by = self.ended_by or reason
        if self.server is not None:
            fleet.lose(self.server, self.ended_by)


class OwnedServer:
    """One server of a run, through its restarts.

    Args:
      index: from 0; gives it its name.
    """

    def __init__(self, common: OwnedServers, index: int) -> None:
        self._common = common
        self._index = index
        self.name = f"SGLang server {index}"
        self.log_path = common.log_dir / f"sglang-{index}.log"

    async def keep(self, fleet: Fleet, snapshots: Snapshots, admit: Admit, started: trio.Event) -> None:
        """See `Keeper`: start the server, and start it again when it dies or hangs.

        Raises:
          ConfigError: it can't be started at all.
          BackendUnavailable: it never became ready, or died more often than `max_restarts`; ends with its log's tail.

        Cancellation: the server's process tree is ended.
        """
        for n_restarts in range(self._common.max_restarts + 1):
            reason = await self._live(fleet, snapshots, admit, started)
            if not started.is_set():
                raise BackendUnavailable(f"{self.name} did not start: {reason}{self.log_tail()}")
            emit("server.died", server=self.name, reason=reason, restarts=n_restarts, log=str(self.log_path))
        raise BackendUnavailable(
            f"{self.name} died after {self._common.max_restarts} restarts (--sglang-max-restarts): "
            f"{reason}{self.log_tail()}"
        )

    def log_tail(self) -> str:
        """The end of the log, as the end of a message."""
        try:
            data = self.log_path.read_bytes()[-TAIL_BYTES:]
        except OSError:
            return f"; it wrote no log ({self.log_path})"
        return f"; the end of {self.log_path} follows\n{data.decode(errors='replace')}"

    async def _live(self, fleet: Fleet, snapshots: Snapshots, admit: Admit, started: trio.Event) -> str:
        """One process of the server, from its start to its end; returns why it ended."""
        life = _Life()
        port = free_port()
        client = SGLangClient(f"http://{_HOST}:{port}", self.name, self._common.max_inflight)
        self._common.log_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as holding:
            path, version = holding.enter_context(snapshots.held()), snapshots.version
            try:
                async with self._process(path, version, port) as child, trio.open_nursery() as nursery:

                    async def end_with_the_process() -> None:
                        status = await child.wait_exit()
                        life.end(f"it ended with {status}", fleet)
                        nursery.cancel_scope.cancel(reason=f"{self.name} ended")

                    emit("server.started", server=self.name, pid=child.pid, port=port, version=version)
                    nursery.start_soon(end_with_the_process, name=f"{self.name}: exit")
                    try:
                        server = life.server = await connect(client, self._common.start_timeout_s)
                        await admit(server, version)
                    except BackendUnavailable as exc:
                        life.end(str(exc), fleet)
                    else:
                        started.set()
                        holding.close()  # it has its weights
                        reason = await watch_health(server, fleet, self._common.health_timeout_s)
                        await trio.sleep(EXIT_TOLD_S)
                        life.end(reason, fleet)
                    nursery.cancel_scope.cancel(reason=f"{self.name} is not well")
            finally:
                life.end("the run ended", fleet)
                await client.aclose()
        assert life.ended_by is not None, "said above"
        return life.ended_by

    @asynccontextmanager
    async def _process(self, path: Path, version: str, port: int) -> AsyncIterator[Child]:
        """The process, for the length of the block.

        Raises:
          ConfigError: it can't be started.
        """
        async with AsyncExitStack() as stack:
            what = (
                f"{self.name}: {self._common.python} can't be started; --sglang-python names the Python that has SGLang"
            )
            with boundary(ConfigError, what, OSError):
                child = await stack.enter_async_context(
                    self._common.warden.process(
                        argv=self.argv(path, version, port),
                        cwd=Path(),
                        env=self._environment(),
                        log_path=self.log_path,
                        name=self.name,
                        term_grace_s=TERM_GRACE_S,
                    )
                )
            yield child

    def argv(self, path: Path, version: str, port: int) -> list[str]:
        """The command line of the server."""
        own = ["--model-path", str(path), "--host", _HOST, "--port", str(port), "--weight-version", version]
        metrics = [] if "--enable-metrics" in self._common.args else ["--enable-metrics"]
        return [self._common.python, "-m", "sglang.launch_server", *own, *metrics, *self._common.args]

    def _environment(self) -> dict[str, str]:
        env = dict(os.environ)
        no_proxy = ",".join(filter(None, [env.get("no_proxy") or env.get("NO_PROXY"), _HOST, "localhost"]))
        env["no_proxy"] = env["NO_PROXY"] = no_proxy  # a server asks itself over HTTP
        env["SGLANG_VLM_CACHE_SIZE_MB"] = "0"  # what it keeps of images there outlives the weights it was made with
        if self._common.gpus:
            env["CUDA_VISIBLE_DEVICES"] = self._common.gpus[self._index]
        return env


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
    return port
