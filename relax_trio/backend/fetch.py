"""Images behind http(s): URLs, fetched once and bounded in size, time and redirects."""

from __future__ import annotations

import base64
import functools
import ssl
from typing import Final

import httpx
import trio

from relax_trio.errors import InvalidRequest

MAX_BYTES: Final = 32 * 1024 * 1024
FETCH_S: Final = 30.0
"""Bound of one fetch, redirects included."""

_MAX_REDIRECTS: Final = 3
_CHUNK: Final = 64 * 1024


async def fetch_image(url: str) -> str:
    """The file behind a URL, as a data: URL of no image type.

    Raises:
      InvalidRequest: it can't be had, or is too large; says why.

    Cancellation: safe.
    """
    data = bytearray()
    with trio.move_on_after(FETCH_S) as scope:
        await _get(url, data, scope)
    if len(data) > MAX_BYTES:
        raise InvalidRequest(f"{_shown(url)} is larger than {MAX_BYTES} bytes; send a smaller image")
    if scope.cancelled_caught:
        raise InvalidRequest(f"{_shown(url)} was not fetched within {FETCH_S:g} s; send the image as a data: URL")
    return f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"


async def _get(url: str, data: bytearray, scope: trio.CancelScope) -> None:
    """Read the file into `data`; once that is too large, `scope` is cancelled."""
    try:
        async with (
            httpx.AsyncClient(
                verify=_tls(), follow_redirects=True, max_redirects=_MAX_REDIRECTS, timeout=FETCH_S
            ) as client,
            client.stream("GET", url) as response,
        ):
            if response.status_code != 200:
                raise InvalidRequest(f"{_shown(url)} answers {response.status_code}; send the image as a data: URL")
            async for chunk in response.aiter_bytes(_CHUNK):
                data += chunk
                if len(data) > MAX_BYTES:
                    # Not left by an exception of ours: the generator that is read from would stay half read.
                    scope.cancel(reason="the image is too large")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:
        why = str(exc) or type(exc).__name__
        raise InvalidRequest(f"{_shown(url)} can't be fetched ({why}); send the image itself as a data: URL") from exc


@functools.cache
def _tls() -> ssl.SSLContext:
    """Made once: reading all certificates holds the event loop up for a good part of a fetch."""
    return httpx.create_ssl_context()


def _shown(url: str) -> str:
    """The URL without what may be a secret: its query and its user."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        return "its URL"
    return f"{parsed.scheme}://{parsed.host}{parsed.path}"[:200]
