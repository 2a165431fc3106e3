"""HTTP connections to one server: a stack of single-connection transports behind one limiter.

A pool shared by many callers costs time quadratic in their number, and keeps connections for ever when callers are
cancelled while it is contended. A lane is a transport of its own with one connection; how many there are is counted
here, and no timer but the Trio clock's is left on. A transport and not a client: redirects, cookies and authentication
would take a third of a request's time, and no server here has any.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
import trio

from relax_trio.errors import BackendUnavailable
from relax_trio.sync.cleanup import cleanup_scope

KEEPALIVE_S = 3.0
"""An idle connection older than this is not used again: uvicorn closes it after 5 s, maybe while a request is sent."""

_CLOSE_S = 2.0
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Made once: each transport would make one of its own, for plain HTTP too."""

_HEADERS = {"content-type": "application/json"}


class _Body(httpx.AsyncByteStream):
    """The body of one request. No async generator: one that a broken connection leaves half read has no owner."""

    def __init__(self, data: bytes) -> None:
        self._chunks = [data] if data else []

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if not self._chunks:
            raise StopAsyncIteration
        return self._chunks.pop()


class Lanes:
    """At most `max_lanes` requests at once to one server.

    Args:
      base_url: scheme, host and port.
      max_lanes: requests at once; others wait, in order.
    """

    def __init__(self, base_url: str, max_lanes: int) -> None:
        self._base_url = base_url
        self._limiter = trio.CapacityLimiter(max_lanes)
        self._lanes: list[httpx.AsyncHTTPTransport] = []
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self._urls: dict[str, httpx.URL] = {}
        self._tls = httpx.create_ssl_context() if base_url.startswith("https:") else _NO_TLS

    @property
    def n_busy(self) -> int:
        """Requests under way."""
        return self._limiter.borrowed_tokens

    async def request(
        self, method: str, path: str, content: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """Send one request and read its whole answer, whatever its status.

        Args:
          headers: besides those that every request has.

        Raises:
          BackendUnavailable: the server can't be reached, or the connection broke.

        Cancellation: the connection is closed. The server is not told by that.
        """
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = httpx.URL(self._base_url + path)
        data = content or b""
        all_headers = {**_HEADERS, **(headers or {}), "host": url.netloc.decode(), "content-length": str(len(data))}
        request = httpx.Request(method, url, headers=all_headers, stream=_Body(data))
        async with self._lane() as transport:
            try:
                response = await transport.handle_async_request(request)
                await response.aread()
            except httpx.TransportError as exc:
                text = str(exc) or type(exc).__name__
                raise BackendUnavailable(f"{method} {self._base_url}{path}: {text}") from exc
            return response

    async def aclose(self) -> None:
        """Close every connection. Requests under way must have been cancelled. Cancellation: shielded and bounded."""
        lanes, self._lanes, self._idle = self._lanes, [], []
        with cleanup_scope(_CLOSE_S, f"connections to {self._base_url}"):
            for transport in lanes:
                await transport.aclose()

    @asynccontextmanager
    async def _lane(self) -> AsyncIterator[httpx.AsyncHTTPTransport]:
        async with self._limiter:
            transport = self._idle.pop() if self._idle else self._make_lane()
            try:
                yield transport
            finally:
                self._idle.append(transport)  # last in, first out: few connections stay warm

    def _make_lane(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=1, keepalive_expiry=KEEPALIVE_S)
        transport = httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=limits)
        self._lanes.append(transport)
        return transport
