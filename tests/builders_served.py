"""A real Session behind the real server: scripted turns, raw clients, and connections that break where a test says."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
from attrs import define, evolve, field
from builders_api import OPERATOR
from builders_runtime import make_tasks, open_shared
from builders_tokens import THINKING_PROMPT, make_codec

import relax_trio.api.serve
from relax_trio.api.app import make_app
from relax_trio.api.serve import ApiServer
from relax_trio.api.transport import Transport
from relax_trio.backend.fake import FakeBackend
from relax_trio.config.tree import ServerConfig
from relax_trio.ids import GroupId, PlaceId
from relax_trio.runtime.session import Session
from relax_trio.runtime.shared import TurnLimits


@define(eq=False)
class Served:
    """A served Session.

    Attributes:
      end: ends the Session; the server goes on.
      cuts: for connections to come, in order: how many bytes of the server's get through before the connection breaks;
        None: all of them.
    """

    session: Session
    backend: FakeBackend
    port: int
    end: Callable[[], Awaitable[None]]
    cuts: deque[int | None] = field(factory=deque)

    @property
    def n_generated(self) -> int:
        """Attempts that the engine was asked for."""
        return len(self.backend.attempts)

    @property
    def kinds(self) -> list[str]:
        return [node.kind for node in self.session.forest.nodes]

    @property
    def nodes(self):
        """Everything in the forest, as the operator sees it."""
        return self.session.debug_state(forest=True)["nodes"]

    def head(self, path: str, body: bytes, *, retry: int = 0, method: str = "POST", headers=()) -> bytes:
        """Start line and headers of a request that closes its connection."""
        lines = [
            f"{method} /agentic_api{path} HTTP/1.1",
            "host: 127.0.0.1",
            f"authorization: Bearer {self.session.credential}",
            f"x-stainless-retry-count: {retry}",
            f"content-length: {len(body)}",
            "connection: close",
            *headers,
        ]
        return "\r\n".join([*lines, "", ""]).encode()

    async def ask(self, path: str, body: bytes, **head) -> bytes:
        """Send a request, read all that comes, as bytes on the wire."""
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            await stream.send_all(self.head(path, body, **head) + body)
            return await read_to_end(stream)


async def read_to_end(stream: trio.SocketStream) -> bytes:
    """All bytes up to the end of the connection, however it ends."""
    data = bytearray()
    try:
        async for chunk in stream:
            data += chunk
    except trio.BrokenResourceError:
        pass
    return bytes(data)


def status_of(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


def body_of(reply: bytes) -> bytes:
    """The body of a whole reply; the parts of a chunked one together."""
    head, _, body = reply.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return body
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        parts.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(parts)


class CutTransport(Transport):
    """A connection over which only so many bytes reach the client; the write that goes beyond fails half done."""

    def __init__(self, stream: trio.SocketStream, left: int) -> None:
        super().__init__(stream)
        self._left = left

    async def send_all(self, data: bytes) -> None:
        through = data[: self._left]
        self._left -= len(through)
        await super().send_all(through)
        if len(through) < len(data):
            self.cut()
            self.has_failed = True
            raise trio.BrokenResourceError


@asynccontextmanager
async def open_served(texts, *, codec=None, retry_grace_s=5.0, tokens_per_s=1.0, **config):
    """A leased Session whose turns say `texts`, one token a virtual second, behind a server of its own."""
    codec = codec or make_codec(THINKING_PROMPT)
    end = codec.encode_text("<|im_end|>")
    backend = FakeBackend(
        [[*codec.encode_text(text), *end] for text in texts], tokens_per_s=tokens_per_s, max_context_len=200_000
    )
    lease = trio.Event()
    lease.set()
    cuts: deque[int | None] = deque()

    def transport(stream):
        left = cuts.popleft() if cuts else None
        return Transport(stream) if left is None else CutTransport(stream, left)

    async with open_shared(backend=backend, retry_grace_s=retry_grace_s) as shared:
        session = Session(
            place=PlaceId("G0/0"),
            group=GroupId("G0"),
            index=0,
            mode="train",
            task=make_tasks(1)[0],
            limits=TurnLimits(temperature=1.0, max_response_len=400, max_context_len=200_000),
            shared=evolve(shared, codec=codec),
            lease=lease,
        )
        app = make_app(
            shared.sessions,
            config=ServerConfig(**config),
            operator_token=OPERATOR,
            cpu=shared.cpu,
            template_variables=codec.template.variables,
        )
        server = ApiServer(app, ServerConfig(**config))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(relax_trio.api.serve, "Transport", transport)
            async with trio.open_nursery() as nursery:
                url = await nursery.start(server.run)
                async with AsyncExitStack() as stack:
                    await stack.enter_async_context(session.open())
                    yield Served(session, backend, int(url.split(":")[2].split("/")[0]), stack.aclose, cuts)
                server.stop()
