"""Added time of one Chat request over loopback, for agents with long histories and a backend that answers at once.

A server process holds the Sessions, each with the same long conversation recorded turn by turn, and on a second port a
plain ASGI echo on the same server stack: the floor. This process offers requests open-loop (arrivals are drawn in
advance, and a latency counts from the drawn moment to the last byte), by turns to the echo and to the API, with one
connection for each Session and bodies of equal size. Every request carries the whole history, what was answered since,
and a new message; each Session has made one before anything is measured. Exits with 1 if the added time misses a bound
or a request fails.

    python tools/bench_api.py [--json] [--rate 50] [--sessions 256] [--tokens 32768] [--seconds 10] [--rounds 3]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import pydoc_data.topics
import random
import statistics
import subprocess
import sys
import time
from array import array
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import trio

MOST_MEDIAN_MS, MOST_P99_MS = 5.0, 25.0
OBSERVATION_TOKENS, RESPONSE_TOKENS = 400, 112
"""Of each turn of the history: a tool result, and a short answer."""

VOCABULARY = 8192
REPLY_TOKENS = 100
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} something in the working directory and give the result as text.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name in ("read", "write", "search", "run", "list")
]


def english() -> str:
    """Plain text that every Python has."""
    return "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


# --- the server process ----------------------------------------------------------------------------------------


def make_codec():  # noqa: ANN201  # imports of the server process only
    """The demo's template over a BPE of ordinary compression."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from relax_trio.demo.tokenizer import CONTROL_TOKENS, END_OF_TURN, MARK_TOKENS, PADDING, chat_template
    from relax_trio.tokens.codec import ChatCodec

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS],
    )
    bpe.train_from_iterator(english().splitlines(), trainer)
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARK_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TURN, pad_token=PADDING, chat_template=chat_template()
    )
    return ChatCodec.from_tokenizer(tokenizer, tool_call_parser="qwen25", reasoning_parser="qwen3")


class BackendAtOnce:
    """Answers every attempt with the same tokens, without a wait."""

    max_context_len = 1_000_000
    weight_version = "0"

    def __init__(self, ids: array[int]) -> None:
        from relax_trio.backend.base import AttemptResult
        from relax_trio.data.sample import VersionSpan

        spans = (VersionSpan(version="0", n_tokens=len(ids)),)
        self._result = AttemptResult(
            token_ids=ids, logprobs=array("d", [-0.5] * len(ids)), finish="stop", versions=spans
        )

    async def generate(self, attempt: object) -> object:
        """See `Backend`."""
        await trio.lowlevel.checkpoint()
        return self._result

    async def close_session(self, session_key: str) -> None:
        """See `Backend`."""
        await trio.lowlevel.checkpoint()


async def echo(scope: dict, receive: object, send: object) -> None:
    """Read the body, answer with as many bytes as a reply of the API has."""
    if scope["type"] != "http":
        return
    more = True
    while more:
        message = await receive()
        more = message.get("more_body", False)
    reply = b"x" * 900
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(reply))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": reply})


async def serve(n_sessions: int, n_tokens: int) -> None:
    """Hold the Sessions until stdin ends. Prints one JSON line: addresses, credentials and the history."""
    from relax_trio.agent.fake import FakeAgentLauncher
    from relax_trio.api.app import make_app
    from relax_trio.api.serve import ApiServer
    from relax_trio.config.tree import ServerConfig
    from relax_trio.data.task import TaskInput
    from relax_trio.ids import GroupId, place_id
    from relax_trio.loop.start import tune_interpreter
    from relax_trio.runtime.directory import SessionTable
    from relax_trio.runtime.session import Session
    from relax_trio.runtime.shared import Shared, TurnLimits
    from relax_trio.sync.cpu import ThreadCpuPool

    codec = make_codec()
    tune_interpreter()
    text = english()
    answer = array("i", [*codec.encode_text(text[5000:])[:REPLY_TOKENS], codec.stop_token_ids[0]])
    sessions = SessionTable(lambda: False)
    shared = Shared(
        backend=BackendAtOnce(answer),
        codec=codec,
        launcher=FakeAgentLauncher(lambda agent: None),
        cpu=ThreadCpuPool(os.cpu_count() or 1),
        sessions=sessions,
        base_url="",
        attempt_permits=trio.CapacityLimiter(1024),
    )
    limits = TurnLimits(temperature=1.0, max_response_len=1024, max_context_len=1_000_000)
    turns, history = conversation(codec, n_tokens)
    lease = trio.Event()
    lease.set()
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        credentials = []
        for index in range(n_sessions):
            session = Session(
                place=place_id(GroupId("S0"), index),
                group=GroupId("S0"),
                index=index,
                mode="train",
                task=TaskInput(row=0, source="bench", prompt="", messages=(), metadata={}),
                limits=limits,
                shared=shared,
                lease=lease,
            )
            await stack.enter_async_context(session.open())
            record(session.forest, turns)
            credentials.append(session.credential)
        app = make_app(
            sessions,
            config=ServerConfig(),
            operator_token="operator",
            cpu=shared.cpu,
            template_variables=codec.template.variables,
        )
        servers = [ApiServer(app, ServerConfig()), ApiServer(echo, ServerConfig())]
        urls = [await nursery.start(server.run) for server in servers]
        gc.collect()  # of what was needed to set this up
        said = {"ports": [int(url.split(":")[2].split("/")[0]) for url in urls], "credentials": credentials}
        print(json.dumps({**said, "history": history, "pid": os.getpid()}), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        for server in servers:
            server.stop()


def conversation(codec, n_tokens: int) -> tuple[list, list]:  # noqa: ANN001
    """Turns of `n_tokens` in all: new messages, their ids, the answer, its ids; and the history as a client has it."""
    from relax_trio.data.normalize import normalize_messages, normalize_tools
    from relax_trio.ids import StateHash

    ids, tools = codec.encode_text(english() * 2), normalize_tools(TOOLS)
    at = 0

    def text(length: int) -> str:
        nonlocal at
        at += length
        return codec.decode(ids[at - length : at])

    turns, history, total = [], [], 0
    while total < n_tokens:
        (new,) = normalize_messages([{"role": "user", "content": text(OBSERVATION_TOKENS)}])
        if not turns:
            observation_ids = codec.encode_opening((new,), tools, {})
        else:
            turn, turn_ids = turns[-1][2], turns[-1][3]
            observation_ids = codec.encode_observation((new,), tools, {}, turn=turn, turn_ids=turn_ids)
        response_ids = array("i", [*codec.encode_text(text(RESPONSE_TOKENS)), codec.stop_token_ids[0]])
        message = codec.read_turn(
            response_ids, stopped=True, tools=tools, state=StateHash(bytes(32)), stop_string=None
        ).message
        turns.append((new, observation_ids, message, response_ids))
        history += [{"role": "user", "content": new.content}, {"role": "assistant", "content": message.content}]
        total += len(observation_ids) + len(response_ids)
    return turns, history


def record(forest, turns: list) -> None:  # noqa: ANN001
    """Commit the conversation, turn by turn."""
    from relax_trio.data.normalize import normalize_tools
    from relax_trio.data.sample import VersionSpan

    tools, messages = normalize_tools(TOOLS), []
    for new, observation_ids, message, response_ids in turns:
        messages.append(new)
        match = forest.match(messages, tools, {})
        forest.commit(
            match,
            observation_ids,
            message=message,
            token_ids=response_ids,
            logprobs=array("d", [-0.5] * len(response_ids)),
            versions=(VersionSpan(version="0", n_tokens=len(response_ids)),),
            finish="stop",
        )
        messages.append(message)


# --- the load --------------------------------------------------------------------------------------------------


@dataclass
class Agent:
    """One client: its connection to each port, and what was said since the common history."""

    credential: str
    streams: list[trio.SocketStream]
    said: list[bytes] = field(default_factory=list)
    is_busy: bool = False


@dataclass
class Kind:
    """What was measured of one kind of request: latencies in s, CPU time of the server in s."""

    latencies: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    n_skipped: int = 0

    def quantiles(self) -> tuple[float, float, float]:
        """Median, p99 and the largest, in ms."""
        ordered = sorted(self.latencies)
        at99 = min(len(ordered) - 1, int(0.99 * len(ordered)))
        return 1e3 * statistics.median(ordered), 1e3 * ordered[at99], 1e3 * ordered[-1]


@dataclass
class Load:
    """Offers requests to a running server."""

    head: bytes
    agents: list[Agent]
    ports: list[int]
    pid: int
    rng: random.Random
    n_sent: int = 0

    async def phase(self, which: int, n_requests: int, rate: float, into: Kind | None) -> None:
        """Offer `n_requests` at `rate` a second to port `which`, one agent after another."""
        cpu_s, start = server_cpu_s(self.pid), time.perf_counter() + 0.05
        at = 0.0
        async with trio.open_nursery() as nursery:
            for _ in range(n_requests):
                at += self.rng.expovariate(rate)
                await trio.sleep(max(0.0, start + at - time.perf_counter()))
                agent = self.agents[self.n_sent % len(self.agents)]
                self.n_sent += 1
                if agent.is_busy:
                    if into is not None:
                        into.n_skipped += 1
                    continue
                nursery.start_soon(self.ask, agent, which, start + at, into)
        if into is not None:
            into.cpu_s += server_cpu_s(self.pid) - cpu_s

    async def ask(self, agent: Agent, which: int, due: float, into: Kind | None) -> None:
        """One request; the API's answer becomes part of what the agent says next."""
        agent.is_busy = True
        new = json.dumps({"role": "user", "content": f"line {len(agent.said)}: go on, please. " * 20}).encode()
        body = b"".join([self.head, b",".join([b"", *agent.said, new]), b"]}"])
        head = (
            f"POST /agentic_api/v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{self.ports[which]}\r\n"
            f"authorization: Bearer {agent.credential}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        stream = agent.streams[which]
        await stream.send_all(head.encode() + body)
        status, reply = await read_reply(stream)
        if into is not None:
            into.latencies.append(time.perf_counter() - due)
        if status != 200:
            raise SystemExit(f"bench_api: status {status}: {reply[:500].decode()}")
        if which == 0:
            message = json.loads(reply)["choices"][0]["message"]
            agent.said += [new, json.dumps({"role": "assistant", "content": message["content"]}).encode()]
        agent.is_busy = False


async def read_reply(stream: trio.SocketStream) -> tuple[int, bytes]:
    """Status and body of one reply that says its length."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = await stream.receive_some()
        if not chunk:
            raise SystemExit("bench_api: the server closed a connection")
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
    while len(body) < length:
        body += await stream.receive_some()
    return int(lines[0].split()[1]), body


def server_cpu_s(pid: int) -> float:
    """User and system time of the server so far."""
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


async def measure(args: argparse.Namespace, said: dict) -> dict[str, Kind]:
    """Alternate between the floor and the API."""
    history = json.dumps(said["history"])[1:-1]
    head = f'{{"model": "m", "tools": {json.dumps(TOOLS)}, "messages": [{history}'.encode()
    async with AsyncExitStack() as stack:
        agents = []
        for credential in said["credentials"]:
            streams = [await trio.open_tcp_stream("127.0.0.1", port) for port in said["ports"]]
            for stream in streams:
                await stack.enter_async_context(stream)
            agents.append(Agent(credential, streams))
        load = Load(head, agents, said["ports"], said["pid"], random.Random(args.seed))
        api, floor = Kind(), Kind()
        for which in (1, 0):
            await load.phase(which, args.sessions, args.rate, None)  # a Session has had turns before the one measured
        for _ in range(args.rounds):
            for which, kind in ((1, floor), (0, api)):
                await load.phase(which, int(args.rate * args.seconds), args.rate, kind)
    return {"floor": floor, "api": api, "body": len(head)}


def main() -> int:
    """Measure and print; 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rate", type=float, default=50.0, help="requests offered a second")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32768, help="length of each history")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a phase")
    parser.add_argument("--rounds", type=int, default=3, help="phases of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        trio.run(serve, args.sessions, args.tokens)
        return 0
    command = [sys.executable, __file__, "--serve", "--sessions", str(args.sessions), "--tokens", str(args.tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        line = server.stdout.readline()
        if not line:
            raise SystemExit("bench_api: the server did not start")
        before = os.getloadavg()[0]
        found = trio.run(measure, args, json.loads(line))
        server.stdin.close()
    return report(args, found, before)


def report(args: argparse.Namespace, found: dict, load_before: float) -> int:
    """Print what was found."""
    rows, values = [], {}
    for name in ("floor", "api"):
        median, p99, worst = found[name].quantiles()
        n = len(found[name].latencies)
        cpu = 1e3 * found[name].cpu_s / n
        values[name] = {
            "n": n,
            "skipped": found[name].n_skipped,
            "median_ms": median,
            "p99_ms": p99,
            "max_ms": worst,
            "server_cpu_ms": cpu,
        }
        rows.append(f"{name:6} {n:6} {median:10.2f} {p99:10.2f} {worst:10.2f} {cpu:12.2f}")
    added = {key: values["api"][key] - values["floor"][key] for key in ("median_ms", "p99_ms", "server_cpu_ms")}
    is_met = (
        added["median_ms"] <= MOST_MEDIAN_MS
        and added["p99_ms"] <= MOST_P99_MS
        and not any(values[name]["skipped"] for name in values)
    )
    conditions = {
        "rate": args.rate,
        "sessions": args.sessions,
        "tokens": args.tokens,
        "body_bytes": found["body"],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
    }
    if args.json:
        print(json.dumps({**values, "added": added, "conditions": conditions, "is_met": is_met}))
        return 0 if is_met else 1
    print(" ".join(f"{key}={value}" for key, value in conditions.items()))
    print("kind        n  median ms     p99 ms     max ms  server cpu ms")
    print("\n".join(rows))
    print(
        f"added (api - floor): median {added['median_ms']:.2f} ms (bound {MOST_MEDIAN_MS:g}), "
        f"p99 {added['p99_ms']:.2f} ms (bound {MOST_P99_MS:g}), "
        f"server cpu {added['server_cpu_ms']:.2f} ms: {'met' if is_met else 'MISSED'}"
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
