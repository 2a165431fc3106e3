"""Whether a reply reached the transport: the one place that ends a front half's hold on its call.

A reply is delivered when its last byte was taken by the socket and no disconnect had been seen before. The moment is
that of the last write's return, no later: a client that has read its last byte may close the connection, or exit,
before the server has even ended the response, and the handler is then cancelled although the client has its reply.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol, cast

import trio
from attrs import define

from relax_trio.api.sessions import CallPort
from relax_trio.api.transport import Transport
from relax_trio.ids import PlaceId

_REPLY = "relax_trio.reply"
_TRANSPORT = "relax_trio.transport"


@define(eq=False)
class Reply:
    """The reply of one HTTP request.

    Attributes:
      place: the Session that the request came to, None before it is known.
    """

    _transport: Transport | None
    place: PlaceId | None = None
    _call: CallPort | None = None
    _end: Literal["open", "delivered", "lost"] = "open"

    def hold(self, call: CallPort) -> None:
        """This reply will be the call's."""
        self._call = call

    async def last_part(self, body: bytes) -> AsyncGenerator[bytes]:
        """Yield the last bytes of a response, or all of them, and see what becomes of them."""
        with self.last_bytes():
            # The framework resumes a body as soon as the server has written its part, without a checkpoint in between.
            yield body

    @contextmanager
    def last_bytes(self) -> Iterator[None]:
        """A block that writes the last bytes of a response, or all of them; sees what becomes of them."""
        if self._transport is not None and self._transport.is_gone:
            self.lost()
        yield
        if self._transport is not None and self._transport.has_failed:
            self.lost()
        elif self._end == "open":
            self._end = "delivered"
            if self._call is not None:
                self._call.delivered()

    def lost(self) -> None:
        """The connection broke, or the request ended, before the last byte was out."""
        if self._end == "open":
            self._end = "lost"
            if self._call is not None:
                self._call.detach()


class AsgiApp(Protocol):
    """An ASGI application."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one scope."""
        ...


class ReplyTracker:
    """Gives each HTTP scope its `Reply`, and ends it with the request, however that ends.

    It also keeps the server's disconnect message from the framework once the response's end is being sent. Hypercorn
    sends that message after every response, and Quart answers it by cancelling the task in which Hypercorn is about to
    close the connection or to make it ready for the next request.
    """

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one scope."""
        if (
            scope["type"] == "websocket"
        ):  # spoken by nothing here; refused before the framework makes a connection of it
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reply = Reply(scope.get(_TRANSPORT))
        cast("MutableMapping[str, object]", scope)[_REPLY] = reply
        is_ending = False

        async def watched_receive() -> Any:
            message = await receive()
            if is_ending and message["type"] == "http.disconnect":
                await trio.sleep_forever()  # until the framework, done with the request, cancels its reader
            return message

        async def watched_send(message: Any) -> None:
            nonlocal is_ending
            is_ending = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, watched_receive, watched_send)
        finally:
            reply.lost()


def over(transport: Transport, app: AsgiApp) -> AsgiApp:
    """`app` for the requests of one connection."""

    async def app_over_transport(scope: Any, receive: Any, send: Any) -> None:
        cast("MutableMapping[str, object]", scope)[_TRANSPORT] = transport
        await app(scope, receive, send)

    return app_over_transport


def find_reply(scope: Mapping[str, Any]) -> Reply:
    """The `Reply` of a request's scope."""
    reply = scope[_REPLY]
    assert isinstance(reply, Reply), "the tracker wraps the app"
    return reply
