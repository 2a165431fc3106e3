"""The front half of a model request: an ASGI application of its own, in front of the one with the views.

It finds the Session, reads the body, submits, waits and writes; it owns nothing that matters when it is cancelled. It
speaks ASGI directly because every model request of every agent goes through it: a framework's request costs as much
again as all that is done here.

Not covered: sockets and shutdown (serve.py), what a dialect says (chat.py, responses.py, anthropic.py), what becomes of
a reply (reply.py), the work itself (runtime).
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Mapping
from contextlib import aclosing, suppress
from typing import Any, Final, Self, TypeAlias, TypeVar

import trio
from attrs import define

from relax_trio.api.anthropic import MESSAGES
from relax_trio.api.body import drain_body, parse_body, read_body
from relax_trio.api.chat import CHAT
from relax_trio.api.credentials import is_retry, live_session
from relax_trio.api.dialect import Dialect, ParsedRequest, reply_bytes
from relax_trio.api.history import History, read_json
from relax_trio.api.paths import BASE_PATH
from relax_trio.api.refusal import refusal_of
from relax_trio.api.reply import AsgiApp, Reply, find_reply
from relax_trio.api.responses import RESPONSES
from relax_trio.api.sessions import SessionDirectory
from relax_trio.api.sse import call_name, sse_frames
from relax_trio.data.json import JsonObject
from relax_trio.data.request import CanonicalRequest
from relax_trio.errors import MethodNotAllowed
from relax_trio.sync.cpu import CpuPool

INLINE_BODY_BYTES = 256 * 1024
"""Up to this many new bytes are parsed on the event loop (a few milliseconds); a thread costs more than it saves."""

_JSON_HEAD: Final = (b"content-type", b"application/json")
_SSE_HEAD: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_SLASHES: Final = re.compile("/{2,}")  # base URLs with a slash at their end
_Headers: TypeAlias = "tuple[tuple[bytes, bytes], ...]"
_T = TypeVar("_T")


class _ClientGone(Exception):
    """The client left before its request was whole."""


@define(eq=False, kw_only=True)
class _Exchange:
    """One HTTP request and the way to answer it.

    Attributes:
      headers: by lower-case name; of several the first.
      is_read: the body has arrived.
      has_begun: the head of the answer is out.
    """

    path: str
    headers: Mapping[str, str]
    reply: Reply
    receive: Callable[[], Awaitable[Any]]
    send: Callable[[Any], Awaitable[None]]
    is_read: bool = False
    has_begun: bool = False

    def __aiter__(self) -> Self:
        """The body as it arrives, or what is left of it."""
        return self

    async def __anext__(self) -> bytes:
        """The next part of the body.

        Raises:
          _ClientGone: it will never be whole.
        """
        if self.is_read:
            raise StopAsyncIteration
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone
        self.is_read = not message.get("more_body", False)
        body: bytes = message.get("body", b"")
        return body

    async def answer(self, value: JsonObject, *, status: int = 200, headers: _Headers = ()) -> None:
        """Answer with one JSON document."""
        body = reply_bytes(value)
        await self.begin((_JSON_HEAD, (b"content-length", b"%d" % len(body)), *headers), status=status)
        with self.reply.last_bytes():
            await self.send({"type": "http.response.body", "body": body})

    async def begin(self, headers: _Headers, *, status: int = 200) -> None:
        """Send the head of the answer."""
        self.has_begun = True
        await self.send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def stream(self, frames: AsyncGenerator[bytes]) -> None:
        """Answer with frames as they come."""
        await self.begin(_SSE_HEAD)
        async with aclosing(frames):
            async for part in frames:
                await self.send({"type": "http.response.body", "body": part, "more_body": True})
        await self.send({"type": "http.response.body", "body": b""})

    async def refuse(self, exc: Exception) -> None:
        """Answer `exc`, once the client has sent the whole of its request."""
        await drain_body(self)
        refusal = refusal_of(exc, path=self.path, headers=self.headers, place=self.reply.place)
        await self.answer(refusal.envelope, status=refusal.status, headers=refusal.headers)


_Endpoint: TypeAlias = Callable[[_Exchange], Awaitable[None]]


class ModelRequests:
    """The front halves. One for each server; no state of its own.

    Args:
      directory: finds Sessions by credential.
      max_bytes: largest body.
      cpu: parses large bodies off the event loop.
      template_variables: names that the checkpoint's chat template reads, see `Dialect.parse`.
      others: serves every other path.
    """

    def __init__(
        self,
        directory: SessionDirectory,
        *,
        max_bytes: int,
        cpu: CpuPool,
        template_variables: Container[str],
        others: AsgiApp,
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._cpu = cpu
        self._template_variables = template_variables
        self._others = others
        self._endpoints: dict[str, _Endpoint] = {}
        for path, dialect in (("/chat/completions", CHAT), ("/responses", RESPONSES), ("/messages", MESSAGES)):
            self._add(path, self._speaking(dialect))
        self._add("/messages/count_tokens", self._count_tokens)

    @property
    def paths(self) -> frozenset[str]:
        """Where model requests are taken."""
        return frozenset(self._endpoints)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one scope.

        Cancellation: the reply is lost, the call goes on (reply.py).
        """
        if scope["type"] != "http":
            await self._others(scope, receive, send)
            return
        target = _path_of(scope["path"])
        path = _SLASHES.sub("/", target).rstrip("/")
        endpoint = self._endpoints.get(path)
        if endpoint is None:
            await self._others({**scope, "path": target}, receive, send)
            return
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
        exchange = _Exchange(path=path, headers=headers, reply=find_reply(scope), receive=receive, send=send)
        try:
            if scope["method"] != "POST":
                raise MethodNotAllowed(f"{path} does not take {scope['method']}; it takes POST", allowed=["POST"])
            await endpoint(exchange)
        except _ClientGone:
            pass
        except Exception as exc:  # what is raised here is answered, and never ends the run
            if exchange.has_begun:  # a second answer is none: the server breaks the connection and tells why
                raise
            with suppress(_ClientGone):
                await exchange.refuse(exc)

    def _add(self, path: str, endpoint: _Endpoint) -> None:
        """SDKs differ in whether they append `/v1`."""
        for prefix in ("", "/v1"):
            self._endpoints[f"{BASE_PATH}{prefix}{path}"] = endpoint

    def _speaking(self, dialect: Dialect) -> _Endpoint:
        """The endpoint at which `dialect` is spoken."""

        async def model_request(exchange: _Exchange) -> None:
            await self._model_request(exchange, dialect)

        return model_request

    async def _model_request(self, exchange: _Exchange, dialect: Dialect) -> None:
        reply, path, retry = exchange.reply, exchange.path, is_retry(exchange.headers)
        session = live_session(self._directory, exchange.headers)
        reply.place = session.place
        memo, raw = session.histories, await self._read(exchange)
        known = memo.find(path, raw) if dialect.history_key is not None else None

        def parse() -> tuple[ParsedRequest, History | None]:
            body = read_json(path, raw, known=known, key=dialect.history_key)
            parsed = dialect.parse(
                body.value,
                digest=body.digest,
                retry=retry,
                template_variables=self._template_variables,
                known=body.known,
            )
            # what was left out is told with every request, so such a history is read anew
            if parsed.request.skipped:
                return parsed, None
            return parsed, body.history(parsed.request.messages, parsed.request.tools)

        # what stands before the messages is read with every turn: it may hold long tools
        n_known = 0 if known is None else len(known.prefix) - known.list_at
        parsed, history = await self._run(parse, n_bytes=len(raw) - n_known)
        call = session.submit(parsed.request)
        reply.hold(call)
        if history is not None:  # only now: a Session that ended meanwhile keeps no histories
            memo.remember(history, behind=known)

        async def answer() -> None:
            if parsed.stream:
                # What is refused at once is refused by status: clients look there for a full context first.
                await call.wait_begun()
                await exchange.stream(sse_frames(dialect, parsed, call, session.place, reply))
            else:
                completion = await call.wait_done()
                name = call_name(session.place, completion)
                await exchange.answer(dialect.render(completion, parsed, name=name))

        await _while_connected(exchange, answer)

    async def _count_tokens(self, exchange: _Exchange) -> None:
        """How long the prompt of a Messages request is; begins nothing."""
        session = live_session(self._directory, exchange.headers)
        exchange.reply.place = session.place
        raw = await self._read(exchange)

        def parse() -> CanonicalRequest:
            return MESSAGES.parse_count(parse_body(raw), template_variables=self._template_variables)

        request = await self._run(parse, n_bytes=len(raw))
        await exchange.answer({"input_tokens": await session.count_tokens(request)})

    async def _read(self, exchange: _Exchange) -> bytes:
        announced = exchange.headers.get("content-length", "")
        length = int(announced) if announced.isascii() and announced.isdigit() else None
        return await read_body(exchange, content_length=length, max_bytes=self._max_bytes)

    async def _run(self, parse: Callable[[], _T], *, n_bytes: int) -> _T:
        """What `parse` makes of `n_bytes` of a body, off the event loop where they are many."""
        return parse() if n_bytes <= INLINE_BODY_BYTES else await self._cpu.run(parse)


def _path_of(target: str) -> str:
    """The path of a request target; clients may write a whole URL there, as to a proxy. Begins with a slash always."""
    if target.startswith("/"):
        return target
    return "/" + target.partition("://")[2].partition("/")[2]


async def _while_connected(exchange: _Exchange, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work`, and leave it when the client goes.

    Raises:
      Exception: what `work` raised, as it was.
    """
    error: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_wait_gone, exchange, nursery.cancel_scope)
        try:
            await work()
        except Exception as exc:  # carried out of the nursery, which would make a group of it
            error = exc
        nursery.cancel_scope.cancel(reason="the reply is out")
    try:
        if error is not None:
            raise error
    finally:
        error = None  # no cycle through the traceback: it would keep the request's body


async def _wait_gone(exchange: _Exchange, work: trio.CancelScope) -> None:
    """Cancel `work` once the client is gone. The body was read: only that can still come."""
    while (await exchange.receive())["type"] != "http.disconnect":
        pass
    work.cancel(reason="the client left")
