"""The request body: read up to a limit, parsed as strict JSON; what is refused is still read to its end.

A connection that is closed over unread bytes is reset by the kernel, before the client has read why it was refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterable

import trio

from relax_trio.data.json import JsonValue, parse_json
from relax_trio.errors import InvalidRequest, PayloadTooLarge

MAX_DEPTH = 200
"""Deepest nesting of lists and objects; later recursive passes over a body stay far from Python's own limit."""

DRAIN_S = 5.0
"""How long a refused body is read on."""


async def read_body(chunks: AsyncIterable[bytes], *, content_length: int | None, max_bytes: int) -> bytes:
    """Collect the body.

    Raises:
      PayloadTooLarge: more than `max_bytes`, as announced or as counted.
    """
    if content_length is not None and content_length > max_bytes:
        raise _too_large(max_bytes)
    parts, n_bytes = [], 0
    async for chunk in chunks:
        parts.append(chunk)
        n_bytes += len(chunk)
        if n_bytes > max_bytes:
            raise _too_large(max_bytes)
    return b"".join(parts)


async def drain_body(chunks: AsyncIterable[bytes]) -> None:
    """Read and drop what the client still sends, within `DRAIN_S` seconds."""
    with trio.move_on_after(DRAIN_S):
        async for _ in chunks:
            pass


def parse_body(body: bytes) -> JsonValue:
    """Parse a body as JSON.

    Raises:
      InvalidRequest: not UTF-8, not JSON (NaN and infinities are not), or nested deeper than `MAX_DEPTH`.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"the request body is not UTF-8: {exc.reason} at byte {exc.start}") from exc
    try:
        value = parse_json(text)
    except ValueError as exc:
        raise InvalidRequest(f"the request body is not valid JSON: {exc}") from exc
    check_depth(value)
    return value


def check_depth(value: JsonValue) -> None:
    """Refuse a body that is nested too deeply.

    Raises:
      InvalidRequest: it is.
    """
    if _is_deeper(value, MAX_DEPTH):
        raise InvalidRequest(f"the request body is nested deeper than {MAX_DEPTH} levels")


def _is_deeper(value: JsonValue, max_depth: int) -> bool:
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(max_depth):
        if not level:
            return False
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, list | dict)
        ]
    return bool(level)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {max_bytes} bytes (--max-request-bytes)")
