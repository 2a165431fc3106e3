"""Mutated request bodies against the served model API: none may give a 5xx, hang, or leave a trace where it is refused.

Bodies are what real clients sent (tests/data/wire), changed at random: other types, deep nesting, numbers that are huge
or not finite, lone surrogates, invalid UTF-8, keys twice, truncation, other content types and encodings, long texts,
empty contents. They go over loopback to the real server with a real Session, whose template prints tools, calls and
reasoning. A case is a function of the seed and its number, and a finding names both. Exits with 1 on any finding.

    python tools/fuzz_api.py [--cases 20000] [--seed 0] [--first 0] [--template qwen3]
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from relax_trio.agent.fake import FakeAgentLauncher
from relax_trio.api.app import make_app
from relax_trio.api.serve import ApiServer
from relax_trio.backend.fake import FakeBackend
from relax_trio.config.tree import ServerConfig
from relax_trio.data.task import TaskInput
from relax_trio.events import Event, event_sink
from relax_trio.ids import GroupId, place_id
from relax_trio.runtime.directory import SessionTable
from relax_trio.runtime.session import Session
from relax_trio.runtime.shared import Shared, TurnLimits
from relax_trio.sync.cpu import ThreadCpuPool
from relax_trio.tokens.codec import ChatCodec

DATA = Path(__file__).parents[1] / "tests" / "data"
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
HANG_S = 60.0
"""A case that takes longer hangs."""

CASES_PER_SESSION = 250
MAX_DEPTH = 40
"""Deepest place that is changed; what is put there may be ten times as deep."""

SAID = (
    "The answer is 4.",
    "<think>\nhm\n</think>\n\nüber",
    '<tool_call>\n{"name": "calc", "arguments": {"a": 2}}\n</tool_call>',
    '<tool_call>\n{"name": "calc", "arguments": 3}\n</tool_call>',
    "<tool_call>\nnothing",
    "",
)
FIELDS = (
    *("messages", "input", "system", "instructions", "tools", "tool_choice", "chat_template_kwargs", "reasoning"),
    *("thinking", "output_config", "model", "max_tokens", "max_completion_tokens", "max_output_tokens", "stop"),
    *("stop_sequences", "seed", "n", "stream", "logprobs", "top_logprobs", "include", "previous_response_id"),
    *("conversation", "prompt", "background", "store", "metadata", "temperature", "parallel_tool_calls"),
)
KINDS = (
    *("text", "input_text", "output_text", "refusal", "image_url", "input_image", "image", "document", "thinking"),
    *("redacted_thinking", "tool_use", "tool_result", "function", "function_call", "function_call_output", "message"),
    *("reasoning", "item_reference", "web_search", "custom", "namespace", "allowed_tools"),
)
KEYS = ("type", "role", "content", "id", "name", "arguments", "input", "output", "call_id", "text", "function")
ROLES = ("user", "assistant", "tool", "system", "developer", "function", "")
TEXTS = (
    *("", " ", "x", "über", "𐍈", "\ud800", "\udfff\ud800", "\x00"),
    *("</think>", "<|im_end|>", "<tool_call>", "{{ 7 }}", "{%"),
)
ODD_BYTES = (b"\xff", b"\xed\xa0\x80", b"\x00", b'"', b"\\", b"{", b"]", b",", b"\\ud800", b"NaN", b"1e999", b"-")


# --- mutations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One request."""

    path: str
    body: bytes
    headers: dict[str, str]


def load_corpus() -> list[tuple[str, Any]]:
    """Path and body of every capture."""
    return [
        (capture.get("path", path), capture["body"])
        for name, path in PATHS.items()
        for capture in json.loads((DATA / f"wire/{name}_requests.json").read_text())
    ]


def make_case(corpus: list[tuple[str, Any]], seed: int, number: int) -> Case:
    """The case of this number."""
    rng = random.Random(f"{seed}/{number}")
    path, body = rng.choice(corpus)
    body = json.loads(json.dumps(body))
    if rng.random() < 0.1:  # another API's body
        path = rng.choice([*PATHS.values(), "/v1/messages/count_tokens"])
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 5))):
        body = _mutate(body, rng)
    raw = _spoil(_text(body, rng), rng) if rng.random() < 0.35 else _text(body, rng)
    return Case(path, raw, _headers(rng))


def _text(body: Any, rng: random.Random) -> bytes:
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    return text.encode("utf-8", "surrogatepass" if rng.random() < 0.1 else "replace")


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every container in `value` with every key or index in it, as deep as recursion carries."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys if depth < MAX_DEPTH else ():
        yield value, key
        yield from _places(value[key], depth + 1)


def _mutate(body: Any, rng: random.Random) -> Any:
    places = list(_places(body))
    if not places:
        return _odd(rng)
    container, key = rng.choice(places)
    what = rng.randrange(8)
    if what == 0:
        container[key] = _odd(rng)
    elif what == 1:
        del container[key]
    elif what == 2 and isinstance(container, list):
        container.insert(rng.randrange(len(container) + 1), json.loads(json.dumps(container[key])))
    elif what == 3 and isinstance(container, list):
        rng.shuffle(container)
    elif what == 4:
        container[key] = [container[key]] if rng.random() < 0.5 else {rng.choice(FIELDS): container[key]}
    elif what == 5 and isinstance(container, dict):
        container[rng.choice(KEYS)] = _odd(rng)
    elif isinstance(container[key], str):
        container[key] = _odd_text(rng)
    else:
        container[key] = rng.choice(places)[0]
        try:
            json.dumps(body)
        except ValueError:  # it holds itself now
            container[key] = None
    return body


def _odd(rng: random.Random, depth: int = 0) -> Any:
    scalars: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.choice((0, -1, 1, 2, 2**31, 2**63, -(2**64), 10**30, 10**4000)),
        lambda: rng.choice((0.0, -0.0, 0.5, 1e308, 1.0, 3e18, float("inf"), float("nan"))),
        lambda: _odd_text(rng),
        lambda: rng.choice(KINDS),
        lambda: rng.choice(ROLES),
    )
    if depth > 3 or rng.random() < 0.6:
        return rng.choice(scalars)()
    if rng.random() < 0.1:
        nested: Any = _odd(rng, 9)
        for _ in range(rng.choice((5, 60, 190, 210, 400))):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        return nested
    if rng.random() < 0.5:
        return [_odd(rng, depth + 1) for _ in range(rng.randrange(4))]
    keys = ("type", "text", "role", "content", "name", "function", "parameters", "id", "enable_thinking", "\ud800", "")
    return {rng.choice(keys): _odd(rng, depth + 1) for _ in range(rng.randrange(5))}


def _odd_text(rng: random.Random) -> str:
    if rng.random() < 0.03:
        return rng.choice(("x", "ü", "\ud800", "<|im_end|>", "\n")) * rng.choice((10_000, 300_000))
    if rng.random() < 0.2:
        return rng.choice(('{"a": 1}', "[1]", "3", "1e999", "NaN", "[" * 5000, '{"a": "\\ud800"}', "null", '"x"'))
    return "".join(rng.choice(TEXTS) for _ in range(rng.randrange(4)))


def _spoil(body: bytes, rng: random.Random) -> bytes:
    """Bytes that are no longer what a JSON writer wrote."""
    at = rng.randrange(len(body) + 1)
    odd = rng.choice(ODD_BYTES)
    what = rng.randrange(10)
    if what == 0:
        return body[:at]
    if what == 1:
        return body[:at] + odd + body[at:]
    if what == 2:
        return body[:at] + odd + body[at + len(odd) :]
    if what == 3:  # a key twice
        key = rng.choice(FIELDS)
        return body[:1] + json.dumps(key).encode() + b":" + json.dumps(_odd(rng)).encode() + b"," + body[1:]
    if what == 4:
        return rng.choice((b"[", b'{"a":', b"[{}," * 3)) * rng.choice((10, 1000, 100_000))
    if what == 5:
        encoding = rng.choice(("utf-16", "utf-32", "utf-8-sig", "latin-1"))
        return body.decode("utf-8", "replace").encode(encoding, "replace")
    if what == 6:
        return gzip.compress(body, mtime=0)
    if what == 7:
        return body + rng.choice((body, b"\n\n", b"\x00", b"}", b" " * 100_000))
    if what == 8:
        return rng.choice((b"", b" ", b"null", b"[]", b'"x"', b"1", b"{}", b"[{}]", b"a=b&c=d", bytes(range(256))))
    return body.replace(b'"', rng.choice((b"'", b"", b'""')), rng.randrange(1, 9))


def _headers(rng: random.Random) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if rng.random() < 0.1:
        form = ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x")
        headers["content-type"] = rng.choice((*form, "text/plain", "", "a/b; charset=\xff"))
    if rng.random() < 0.05:
        headers["content-encoding"] = rng.choice(("gzip", "br", "identity", "x"))
    if rng.random() < 0.1:
        headers["x-stainless-retry-count"] = rng.choice(("0", "1", "2", "-1", "x", "9" * 5000))
    if rng.random() < 0.05:
        headers["accept"] = rng.choice(("text/event-stream", "text/html", "*/*"))
    return headers


# --- running ---------------------------------------------------------------------------------------------------


@dataclass
class Findings:
    """What came of the cases."""

    statuses: Counter[int] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)
    n_streams: int = 0
    slowest_s: float = 0.0


async def fuzz(codec: ChatCodec, *, seed: int, first: int, cases: int) -> Findings:
    """Run the cases one after another."""
    corpus, findings = load_corpus(), Findings()
    for start in range(first, first + cases, CASES_PER_SESSION):
        told: list[Event] = []
        with event_sink(told.append):
            async with open_target(codec) as target:
                for number in range(start, min(start + CASES_PER_SESSION, first + cases)):
                    case = make_case(corpus, seed, number)
                    problem = await target.check(case, findings)
                    failures = [event for event in told if event.name in ("api.failed", "connection.failed")]
                    told.clear()
                    if problem or failures:
                        why = "; ".join([problem or "", *(str(event.fields)[-600:] for event in failures)])
                        findings.found.append(f"--seed {seed} --first {number} --cases 1: {case.path}: {why}")
    return findings


@dataclass
class Target:
    """A served Session."""

    session: Session
    port: int

    async def check(self, case: Case, findings: Findings) -> str | None:
        """Send a case; say what is wrong with what came of it."""
        forest = self.session.forest
        before, started = (len(forest.nodes), len(forest.trees)), time.perf_counter()
        with trio.move_on_after(HANG_S) as scope:
            status, is_stream, body = await self._send(case)
        if scope.cancelled_caught:
            return f"no answer within {HANG_S:g} s"
        findings.statuses[status] += 1
        findings.slowest_s = max(findings.slowest_s, time.perf_counter() - started)
        has_grown = (len(forest.nodes), len(forest.trees)) != before
        if status >= 500 or status in (401, 404, 405):
            return f"status {status}: {body[:300]!r}"
        if status != 200:
            return _wrong_refusal(case, body) or ("the forest has grown" if has_grown else None)
        if is_stream:
            findings.n_streams += 1
            failed = [line for line in body.split(b"\n") if line.startswith(b"data: {") and b"internal_error" in line]
            if failed:
                return f"a stream ended with {failed[0][:300]!r}"
            is_whole = b"data: " in body and body.endswith(b"\n\n")
            return None if is_whole else f"a stream that does not end: {body[-99:]!r}"
        try:
            json.loads(body)
        except ValueError as exc:
            return f"a reply that is no JSON ({exc}): {body[:300]!r}"
        if any(not call.done.is_set() for call in self.session.calls):
            return "a request is still at work"
        return None

    async def _send(self, case: Case) -> tuple[int, bool, bytes]:
        lines = [f"POST /agentic_api{case.path} HTTP/1.1", "host: 127.0.0.1", "connection: close"]
        lines += [f"authorization: Bearer {self.session.credential}", f"content-length: {len(case.body)}"]
        lines += [f"{name}: {value}" for name, value in case.headers.items()]
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            await stream.send_all("\r\n".join([*lines, "", ""]).encode("latin-1") + case.body)
            reply = b"".join([chunk async for chunk in stream])
        head, _, body = reply.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            body = _joined(body)
        return int(head.split(b" ", 2)[1]), b"text/event-stream" in head, body


def _joined(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        parts.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(parts)


def _wrong_refusal(case: Case, body: bytes) -> str | None:
    """What is wrong with an error envelope."""
    error = json.loads(body)
    is_anthropic = "/messages" in case.path
    keys = {"type", "message"} if is_anthropic else {"message", "type", "param", "code"}
    if set(error) != ({"type", "error"} if is_anthropic else {"error"}) or set(error["error"]) != keys:
        return f"the wrong envelope: {body[:300]!r}"
    if not error["error"]["message"] or len(error["error"]["message"]) > 2000:
        return f"a message of {len(error['error']['message'])} characters: {body[:300]!r}"
    return None


@asynccontextmanager
async def open_target(codec: ChatCodec):  # noqa: ANN201
    """A leased Session over a backend that says things in turn, behind a server of its own."""
    texts = [array("i", [*codec.encode_text(text), codec.stop_token_ids[0]]) for text in SAID]
    backend = FakeBackend(lambda attempt: texts[len(attempt.token_ids) % len(texts)], max_context_len=4_000_000)
    sessions = SessionTable(lambda: False)
    shared = Shared(
        backend=backend,
        codec=codec,
        launcher=FakeAgentLauncher(_no_agent),
        cpu=ThreadCpuPool(2),
        sessions=sessions,
        base_url="",
        attempt_permits=trio.CapacityLimiter(64),
    )
    lease = trio.Event()
    lease.set()
    session = Session(
        place=place_id(GroupId("S0"), 0),
        group=GroupId("S0"),
        index=0,
        mode="train",
        task=TaskInput(row=0, source="fuzz", prompt="", messages=(), metadata={}),
        limits=TurnLimits(temperature=1.0, max_response_len=256, max_context_len=100_000),
        shared=shared,
        lease=lease,
    )
    app = make_app(
        sessions,
        config=ServerConfig(),
        operator_token="operator",
        cpu=shared.cpu,
        template_variables=codec.template.variables,
    )
    server = ApiServer(app, ServerConfig())
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        url = await nursery.start(server.run)
        async with session.open():
            yield Target(session, int(url.split(":")[2].split("/")[0]))
        nursery.cancel_scope.cancel()


async def _no_agent(agent: object) -> None:
    """There is no agent process here."""


def make_codec(template: str) -> ChatCodec:
    """The demo's tokenizer with a template of tests/data/templates."""
    from relax_trio.demo.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(2048).to_transformers()
    tokenizer.chat_template = (DATA / f"templates/{template}.jinja").read_text()
    return ChatCodec.from_tokenizer(tokenizer, reasoning_parser="qwen3", tool_call_parser="qwen25")


def main() -> int:
    """Run and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--template", default="qwen3", help="a file of tests/data/templates, without its ending")
    args = parser.parse_args()
    codec, start = make_codec(args.template), time.perf_counter()

    async def run() -> Findings:
        return await fuzz(codec, seed=args.seed, first=args.first, cases=args.cases)

    findings = trio.run(run)
    for finding in findings.found[:50]:
        print(finding)
    statuses = ", ".join(f"{n} with {status}" for status, n in sorted(findings.statuses.items()))
    print(
        f"{args.cases} cases, seed {args.seed}: {statuses}; {findings.n_streams} streams; "
        f"{len(findings.found)} findings; slowest {findings.slowest_s:.2f} s, "
        f"{time.perf_counter() - start:.0f} s in all"
    )
    return 1 if findings.found else 0


if __name__ == "__main__":
    sys.exit(main())
