"""The HTTP server: binds, serves until told to stop, stops within bounded time.

Hypercorn speaks HTTP on each connection; accepting and stopping are done here, because its own `serve` gives no access
to connections, and so neither to the fate of a write (transport.py) nor to a client that will not let go. Stopping is
never cancelling first, which leaves clients hanging: idle connections are closed at once, the others get `GRACEFUL_S`.
"""

from __future__ import annotations

import socket
from functools import partial
from typing import Any, cast

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from relax_trio.api.failures import tell_connection_failure
from relax_trio.api.paths import BASE_PATH
from relax_trio.api.reply import AsgiApp, over
from relax_trio.api.server_log import ServerLog
from relax_trio.api.transport import Transport
from relax_trio.config.tree import ServerConfig
from relax_trio.errors import ConfigError, boundary
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

    def __init__(self, app: AsgiApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._stopping = trio.Event()
        self._ended = trio.Event()
        self._transports: set[Transport] = set()

    def stop(self) -> None:
        """Ask the server to end; `run` returns within `GRACEFUL_S` and a little."""
        self._stopping.set()

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`.

        Starts with the base URL that agents get, e.g. "http://127.0.0.1:8000/agentic_api".

        Raises:
          ConfigError: the address can't be bound; nothing was started.

        Cancellation: as `stop`, then Cancelled; takes at most `GRACEFUL_S` + 3 `MARGIN_S`.
        """
        listener = _bind(self._config)
        url = _base_url(self._config.host, int(listener.socket.getsockname()[1]))
        async with Services.open() as services:
            await services.start(partial(self._serve, listener), name="connections", stop_s=MARGIN_S)
            try:
                task_status.started(url)
                await self._stopping.wait()
            finally:
                self._stopping.set()
                await self._end()

    async def _end(self) -> None:
        with cleanup_scope(GRACEFUL_S + MARGIN_S, "requests open at the end of the http server"):
            await self._ended.wait()
        if not self._ended.is_set():
            # Hypercorn shields its writes without a bound: a client that stopped reading would hold the server.
            for transport in self._transports:
                transport.cut()
            with cleanup_scope(MARGIN_S, "connections of the http server"):
                await self._ended.wait()

    async def _serve(self, listener: trio.SocketListener, *, task_status: trio.TaskStatus[None]) -> None:
        """Accept until told to stop; close idle connections at once, give the others `GRACEFUL_S`."""
        config, context = _hypercorn_config(), WorkerContext(None)

        async def connection(stream: trio.SocketStream) -> None:
            transport = Transport(stream)
            app = ASGIWrapper(over(transport, self._app))
            self._transports.add(transport)
            try:
                await TCPServer(app, config, context, ConnectionState({}), cast("Any", transport)).run()
            except BaseExceptionGroup as group:
                # Some malformed input makes Hypercorn itself raise here: told, but no reason to end the run.
                errors, rest = group.split(Exception)
                if errors is not None:
                    tell_connection_failure(errors)
                if rest is not None:
                    raise rest from None
            finally:
                self._transports.discard(transport)

        try:
            async with trio.open_nursery() as connections:
                async with trio.open_nursery() as accepting:
                    await accepting.start(
                        partial(trio.serve_listeners, connection, [listener], handler_nursery=connections)
                    )
                    task_status.started()
                    await self._stopping.wait()
                    accepting.cancel_scope.cancel(reason="the http server stops")
                await context.terminated.set()
                connections.cancel_scope.deadline = trio.current_time() + GRACEFUL_S
        finally:
            self._ended.set()


def _bind(config: ServerConfig) -> trio.SocketListener:
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
    return trio.SocketListener(trio.socket.from_stdlib_socket(listener))


def _hypercorn_config() -> HypercornConfig:
    config = HypercornConfig()
    config.accesslog = None
    config.errorlog = None
    config.logger_class = ServerLog
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
