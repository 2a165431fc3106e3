"""Whether a reply reached the transport: the one place that ends a front half's hold on its call.

A `Reply` travels in the ASGI scope of each HTTP request. It has three witnesses, and the first one counts:

* The body itself (`last_part`): a generator that is resumed after its last part was written. There is no later moment
  that will do. A client that has read the last byte may close the connection, or exit, before the server has even ended
  the response; the handler is then cancelled, and yet the client has its reply.
* Hypercorn's log hook (server_log.py), called the instant a connection is found broken. Writing to a broken socket
  raises nothing in the framework, so without it a lost reply would look like one that was sent.
* The ASGI wrapper below, for whatever else ends a request: a cancelled handler, a server that shuts down.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, MutableMapping
from typing import Any, Literal, Protocol, cast

from attrs import define

from relax_trio.api.sessions import CallPort
from relax_trio.ids import PlaceId

_KEY = "relax_trio.reply"


@define(eq=False)
class Reply:
    """The reply of one HTTP request.

    Attributes:
      place: the Session that the request came to, None before it is known.
    """

    place: PlaceId | None = None
    _call: CallPort | None = None
    _end: Literal["open", "delivered", "lost"] = "open"

    def hold(self, call: CallPort) -> None:
        """This reply will be the call's; where its client went in the meantime, the call is told at once."""
        self._call = call
        if self._end == "lost":
            call.detach()

    def delivered(self) -> None:
        """The last byte went to the transport."""
        if self._end == "open":
            self._end = "delivered"
            if self._call is not None:
                self._call.delivered()

    def lost(self) -> None:
        """The connection broke, or the request ended."""
        if self._end == "open":
            self._end = "lost"
            if self._call is not None:
                self._call.detach()


async def last_part(body: bytes, reply: Reply) -> AsyncIterator[bytes]:
    """The last bytes of a response, or all of them."""
    yield body
    reply.delivered()


class AsgiApp(Protocol):
    """An ASGI application."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one scope."""
        ...


class ReplyTracker:
    """Gives each HTTP scope its `Reply`, and ends it with the request."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reply = Reply()
        cast("MutableMapping[str, object]", scope)[_KEY] = reply
        try:
            await self._app(scope, receive, send)
        finally:
            reply.lost()


def find_reply(scope: Mapping[str, Any]) -> Reply | None:
    """The `Reply` of a scope, None where the server refused the request before the app saw it."""
    reply = scope.get(_KEY)
    return reply if isinstance(reply, Reply) else None
