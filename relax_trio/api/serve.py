"""The HTTP server: binds, serves until told to stop, stops within bounded time.

Stopping goes by Hypercorn's trigger, never by cancelling it first: a cancelled server leaves its clients hanging, a
triggered one closes idle connections at once and gives the others `GRACEFUL_S`.
"""

from __future__ import annotations

import os
import socket
import stat
from functools import partial

import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio import serve
from quart_trio import QuartTrio

from relax_trio.api.app import BASE_PATH
from relax_trio.api.server_log import ServerLog
from relax_trio.config.tree import ServerConfig
from relax_trio.errors import ConfigError, EngineFault, boundary
from relax_trio.sync.cleanup import cleanup_scope
from relax_trio.sync.services import Services

GRACEFUL_S = 3.0
"""How long open requests may go on once the server stops. Their Sessions have ended by then: they only write."""

MARGIN_S = 1.0
"""Bound of each further step of a stop."""

BACKLOG = 2048
"""A step may start a thousand agents that connect within the same second."""

KEEP_ALIVE_S = 24 * 3600.0
"""Idle connections are closed after this. An agent may compute for hours between two requests on one connection, and
a server that closes it just as the next request is sent looks like a failure; agents close theirs by exiting."""

MAX_HEADER_BYTES = 64 * 1024


class ApiServer:
    """The server of one application. Runs once.

    Args:
      app: what `make_app` made.
      config: host and port; port 0 takes a free one.
    """

    def __init__(self, app: QuartTrio, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._stopping = trio.Event()
        self._ended = trio.Event()

    def stop(self) -> None:
        """Ask the server to end; `run` returns within `GRACEFUL_S` and a little."""
        self._stopping.set()

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`.

        Starts with the base URL that agents get, e.g. "http://127.0.0.1:8000/agentic_api".

        Raises:
          ConfigError: the address can't be bound; nothing was started.
          EngineFault: the server ended unasked.

        Cancellation: as `stop`, then Cancelled; takes at most `GRACEFUL_S` + 3 `MARGIN_S`.
        """
        listener = _bind(self._config)
        port = int(listener.getsockname()[1])
        async with Services.open() as services:
            await services.start(partial(self._serve, listener), name="hypercorn", stop_s=MARGIN_S)
            try:
                task_status.started(_base_url(self._config.host, port))
                await self._stopping.wait()
            finally:
                self._stopping.set()
                await self._end(port)

    async def _end(self, port: int) -> None:
        with cleanup_scope(GRACEFUL_S + MARGIN_S, "requests open at the end of the http server"):
            await self._ended.wait()
        if not self._ended.is_set():
            # Hypercorn shields its writes without a bound: a client that stopped reading would hold the server.
            _cut_connections(port)
            with cleanup_scope(MARGIN_S, "connections of the http server"):
                await self._ended.wait()

    async def _serve(self, listener: socket.socket, *, task_status: trio.TaskStatus[list[str]]) -> None:
        config = _hypercorn_config(listener)
        try:
            await serve(
                self._app,
                config,
                shutdown_trigger=self._stopping.wait,
                task_status=task_status,
                mode="asgi",
            )
        finally:
            self._ended.set()
        if not self._stopping.is_set():
            raise EngineFault("the http server ended although nobody stopped it")


def _bind(config: ServerConfig) -> socket.socket:
    """A listening socket. Bound here rather than by Hypercorn, so that a failure is one plain error."""
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    where = (
        f"--host {config.host} --port {config.port} can't be listened on (another port, or 0 for a free one, may do)"
    )
    with boundary(ConfigError, where, OSError, OverflowError):
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((config.host, config.port))
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    return listener


def _hypercorn_config(listener: socket.socket) -> HypercornConfig:
    config = HypercornConfig()
    config.bind = [f"fd://{listener.detach()}"]
    config.accesslog = None
    config.errorlog = None
    config.logger_class = ServerLog
    config.backlog = BACKLOG
    config.graceful_timeout = GRACEFUL_S
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 2**31
    config.read_timeout = None
    config.h11_max_incomplete_size = MAX_HEADER_BYTES
    config.include_server_header = False
    return config


def _base_url(host: str, port: int) -> str:
    """What agents of this machine use: a wildcard address is no destination."""
    name = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{name}]' if ':' in name else name}:{port}{BASE_PATH}"


def _cut_connections(port: int) -> None:
    """Shut down every connection that this process accepted on `port`; the tasks that use them then fail at once."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as copy:
                inet = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
                if inet and copy.getsockname()[1] == port:
                    copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # closed meanwhile, or the listener itself, which has no peer
