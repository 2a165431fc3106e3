"""Buffered SSE: a frame at once, a heartbeat every 15 seconds, then the whole terminal sequence together."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import trio

from relax_trio.api.dialect import Dialect, ParsedRequest
from relax_trio.api.failures import tell_failure
from relax_trio.api.reply import Reply
from relax_trio.api.sessions import CallPort
from relax_trio.data.request import Completion
from relax_trio.errors import InternalError, ProtocolError
from relax_trio.ids import PlaceId

HEARTBEAT_S = 15.0
"""Clients and proxies give a silent connection a minute or more."""


async def sse_frames(
    dialect: Dialect, parsed: ParsedRequest, call: CallPort, place: PlaceId, reply: Reply
) -> AsyncGenerator[bytes]:
    """Frames of one reply. Waits inside a scope, yields outside of it.

    Cancellation: leaves at once; the call goes on (the reply's end tells it, see reply.py).
    """
    beat_at = trio.current_time()
    yield dialect.sse_open(parsed)
    frames: bytes | None = None
    while frames is None:
        # A client that read slowly may have let several beats pass.
        while beat_at <= trio.current_time():
            beat_at += HEARTBEAT_S
        with trio.move_on_at(beat_at):
            frames = await _terminal(dialect, parsed, call, place)
        if frames is None:
            yield dialect.sse_heartbeat()
    async for part in reply.last_part(frames):
        yield part


async def _terminal(dialect: Dialect, parsed: ParsedRequest, call: CallPort, place: PlaceId) -> bytes:
    try:
        completion = await call.wait_done()
        return dialect.sse_done(completion, parsed, name=call_name(place, completion))
    except ProtocolError as exc:
        return dialect.sse_failed(exc, parsed)
    except Exception as exc:  # the render guard: the framework's own comes too late once the response has begun
        tell_failure(exc, place=place, path="sse")
        failure = InternalError(f"the reply of {place} could not be rendered; the run's log says why")
        return dialect.sse_failed(failure, parsed)


def call_name(place: PlaceId, completion: Completion) -> str:
    """Public name of a call, e.g. "G17-2-r3"."""
    return f"{place.replace('/', '-')}-{completion.request_id}"
