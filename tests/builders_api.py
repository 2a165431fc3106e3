"""Builders for tests of the model API: a fake directory of Sessions, and the real server over it on loopback."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager

import httpx
import trio
from attrs import define, field

from relax_trio.api.app import make_app
from relax_trio.api.history import HistoryMemo
from relax_trio.api.serve import ApiServer
from relax_trio.api.sessions import Statistics
from relax_trio.config.tree import ServerConfig
from relax_trio.data.messages import Message, ToolCall
from relax_trio.data.request import CanonicalRequest, Completion, Usage
from relax_trio.ids import NodeId, RequestId
from relax_trio.sync.cpu import InlineCpuPool

CREDENTIAL = "secret-of-the-session"
OPERATOR = "secret-of-the-operator"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}


def make_completion(message: Message | None = None, *, request_id="r1", finish="stop", **fields) -> Completion:
    return Completion(
        request_id=RequestId(request_id),
        node_id=NodeId(2),
        message=message or Message(role="assistant", content="Grüße"),
        finish=finish,
        usage=Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=5),
        created_unix=1_700_000_000,
        **fields,
    )


def make_tool_message(**fields) -> Message:
    calls = (ToolCall(id="call_1", name="calc", arguments='{"a":2}'), ToolCall(id="call_2", name="calc", arguments="3"))
    return Message(role="assistant", tool_calls=calls, **fields)


@define(eq=False)
class FakeCall:
    """A call that is done `delay_s` after it was accepted; says when it was let go and how."""

    request: object
    answer: Completion | Exception
    ready_at: float
    ends: list[tuple[str, float]] = field(factory=list)
    n_holds: int = 1
    refusal: Exception | None = None

    async def wait_begun(self):
        await trio.lowlevel.checkpoint()
        if self.refusal is not None:
            raise self.refusal

    async def wait_done(self):
        await self.wait_begun()
        await trio.sleep_until(self.ready_at)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def detach(self):
        self._let_go("detached")

    def delivered(self):
        self._let_go("delivered")

    def _let_go(self, how):
        self.n_holds -= 1
        assert self.n_holds >= 0, "one end for each hold"
        self.ends.append((how, trio.current_time()))


@define(eq=False)
class FakeSession:
    """A Session whose calls all take `delay_s` virtual seconds and end with `answer`."""

    place: str = "G17/2"
    delay_s: float = 0.0
    answer: Completion | Exception = field(factory=make_completion)
    refusal: Exception | None = None
    broken: Exception | None = None
    calls: list[FakeCall] = field(factory=list)
    counted: list[CanonicalRequest] = field(factory=list)
    histories: HistoryMemo = field(factory=HistoryMemo)

    def submit(self, request):
        if self.broken is not None:
            raise self.broken
        if request.retry:
            for call in self.calls:
                if call.request.digest == request.digest and ("delivered" not in dict(call.ends)):
                    call.n_holds += 1
                    return call
        call = FakeCall(request, self.answer, trio.current_time() + self.delay_s, refusal=self.refusal)
        self.calls.append(call)
        return call

    async def count_tokens(self, request):
        await trio.lowlevel.checkpoint()
        if self.refusal is not None:
            raise self.refusal
        self.counted.append(request)
        return 7

    def debug_state(self, *, forest):
        return {"place": self.place, "forest": forest}

    @property
    def ends(self):
        return [end for call in self.calls for end in call.ends]


@define(eq=False)
class FakeDirectory:
    sessions: dict[str, FakeSession]
    closing: bool = False

    def find(self, credential):
        return self.sessions.get(credential)

    def debug_state(self, *, forest):
        return {"sessions": [s.debug_state(forest=forest) for s in self.sessions.values()]}

    def statistics(self):
        return Statistics(n_sessions=len(self.sessions), n_requests={"lease": 2, "backend": 1}, n_attempts=1)


@define(eq=False)
class CountingDirectory(FakeDirectory):
    """Counts the lookups of each credential: a retry of an SDK is one more."""

    lookups: Counter[str] = field(factory=Counter)

    def find(self, credential):
        self.lookups[credential] += 1
        return super().find(credential)


@define(eq=False)
class Api:
    """The running API and a client of it that carries the Session's credential."""

    url: str
    client: httpx.AsyncClient
    directory: FakeDirectory
    server: ApiServer

    @property
    def port(self):
        return httpx.URL(self.url).port

    async def chat(self, messages=HI, *, headers=None, **fields):
        body = {"model": "m", "messages": messages, **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)


@asynccontextmanager
async def open_api(session: FakeSession | None = None, *, cpu=None, template_variables=frozenset(), **config):
    """The server of one fake Session, on a free port, for the length of the block."""
    server_config = ServerConfig(**config)
    directory = FakeDirectory({CREDENTIAL: session or FakeSession()})
    app = make_app(
        directory,
        config=server_config,
        operator_token=OPERATOR,
        cpu=cpu or InlineCpuPool(),
        model_name="demo",
        template_variables=template_variables,
    )
    server = ApiServer(app, server_config)
    async with trio.open_nursery() as nursery:
        url = await nursery.start(server.run)
        headers = {"authorization": f"Bearer {CREDENTIAL}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, trust_env=False) as client:
            yield Api(url, client, directory, server)
        server.stop()


def raw_request(api: Api, body: bytes, *, path="/v1/chat/completions", headers=()) -> bytes:
    """One HTTP request as bytes, for tests that break off in the middle."""
    lines = [
        f"POST /agentic_api{path} HTTP/1.1",
        f"host: 127.0.0.1:{api.port}",
        f"authorization: Bearer {CREDENTIAL}",
        f"content-length: {len(body)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def connect(api: Api) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", api.port)
