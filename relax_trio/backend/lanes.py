"""HTTP connections to one server: a stack of single-connection clients behind one limiter.

A pool shared by many callers costs time quadratic in their number, and keeps connections for ever when callers are
cancelled while it is contended. A lane is a client of its own with one connection; how many there are is counted here,
and no timer but the Trio clock's is left on.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import trio

from relax_trio.errors import BackendUnavailable
from relax_trio.sync.cleanup import cleanup_scope

KEEPALIVE_S = 3.0
"""An idle connection older than this is not used again: uvicorn closes it after 5 s, maybe while a request is sent."""

_CLOSE_S = 2.0
_HEADERS = {"content-type": "application/json"}


class Lanes:
    """At most `max_lanes` requests at once to one server.

    Args:
      base_url: scheme, host and port.
      max_lanes: requests at once; others wait, in order.
    """

    def __init__(self, base_url: str, max_lanes: int) -> None:
        self._base_url = base_url
        self._limiter = trio.CapacityLimiter(max_lanes)
        self._clients: list[httpx.AsyncClient] = []
        self._idle: list[httpx.AsyncClient] = []
        self._verify: ssl.SSLContext | bool = httpx.create_ssl_context() if base_url.startswith("https:") else False

    @property
    def n_busy(self) -> int:
        """Requests under way."""
        return self._limiter.borrowed_tokens

    async def request(self, method: str, path: str, content: bytes | None = None) -> httpx.Response:
        """Send one request and read its whole answer, whatever its status.

        Raises:
          BackendUnavailable: the server can't be reached, or the connection broke.

        Cancellation: the connection is closed. The server is not told by that.
        """
        async with self._lane() as client:
            try:
                return await client.request(method, path, content=content, headers=_HEADERS)
            except httpx.TransportError as exc:
                text = str(exc) or type(exc).__name__
                raise BackendUnavailable(f"{method} {self._base_url}{path}: {text}") from exc

    async def aclose(self) -> None:
        """Close every connection. Requests under way must have been cancelled. Cancellation: shielded and bounded."""
        clients, self._clients, self._idle = self._clients, [], []
        with cleanup_scope(_CLOSE_S, f"connections to {self._base_url}"):
            for client in clients:
                await client.aclose()

    @asynccontextmanager
    async def _lane(self) -> AsyncIterator[httpx.AsyncClient]:
        async with self._limiter:
            client = self._idle.pop() if self._idle else self._make_client()
            try:
                yield client
            finally:
                self._idle.append(client)  # last in, first out: few connections stay warm

    def _make_client(self) -> httpx.AsyncClient:
        client = httpx.AsyncClient(
            base_url=self._base_url,
            timeout=None,  # every wait is bounded by a scope of the caller
            trust_env=False,
            verify=self._verify,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=1, keepalive_expiry=KEEPALIVE_S),
        )
        self._clients.append(client)
        return client
