"""CPU time and memory of the forest, against the matching algorithm that hashes every prefix anew.

Both get the same conversation in the same run. The reference works on Chat-shaped messages as it was published: from
the longest prefix down, the JSON with sorted keys of messages, tools and template arguments, its SHA-256, one look-up.
Times are CPU time of this thread, medians. Exits with 1 if a bound is missed.

    python tools/bench_forest.py [--json] [--messages 400] [--kilobytes 770] [--turns 400] [--repeats 100]
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import json
import os
import platform
import statistics
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from relax_trio.data.json import JsonObject, JsonValue, parse_json
from relax_trio.data.messages import Message
from relax_trio.data.normalize import normalize_messages, normalize_tools
from relax_trio.data.sample import VersionSpan
from relax_trio.forest.forest import Match, SessionForest
from relax_trio.forest.lineage import assemble
from relax_trio.forest.matching import Position, Recognized
from relax_trio.forest.node import Tree
from relax_trio.ids import WeightVersion

T = TypeVar("T")

LEAST_RATIO = 100.0
MOST_MATCH_MS = 2.0
MOST_GROWTH = 2.0
MOST_BYTES = 20.0
OBSERVATION_TOKENS, RESPONSE_TOKENS = 400, 120
"""Of each turn: a tool result, and a short call."""

TEXT = 'The quick brown fox jumps over the lazy dog; 0123456789 {"path": "src/main.py"}\\n\t'
TOOLS: list[JsonObject] = [
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


# --- inputs ----------------------------------------------------------------------------------------------------


def conversation(n_messages: int, n_bytes: int) -> list[JsonObject]:
    """Chat-shaped messages, the user's and the assistant's in turn, about `n_bytes` of JSON.

    The last one is the user's, the first one the system's where that makes the number even. Every answer has reasoning.
    """
    n_chars = max(2, n_bytes // n_messages - 60) * len(TEXT) // (len(json.dumps(TEXT)) - 2)
    messages: list[JsonObject] = []
    for index in range(n_messages):
        said = f"{index}: " + (TEXT * (n_chars // len(TEXT) + 1))[:n_chars]
        if (n_messages - index) % 2 == 0 and index > 0:
            half = len(said) // 2
            messages.append({"role": "assistant", "content": said[half:], "reasoning_content": said[:half]})
        else:
            messages.append({"role": "system" if n_messages % 2 == 0 and index == 0 else "user", "content": said})
    return messages


def unechoed(messages: Iterable[JsonObject]) -> list[JsonObject]:
    """As a client sends them that never echoes reasoning."""
    return [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]


def canonical(messages: Sequence[JsonObject]) -> tuple[Message, ...]:
    """Fresh canonical messages, as every request brings them."""
    listed: list[JsonValue] = list(messages)
    return normalize_messages(parse_json(json.dumps(listed)))


def canonical_tools() -> tuple[JsonObject, ...]:
    """The tools as a request brings them."""
    return normalize_tools(list(TOOLS))


# --- reference -------------------------------------------------------------------------------------------------


def reference_match(
    nodes_by_hash: dict[str, str], messages: list[JsonObject], tools: list[JsonObject], kwargs: JsonObject
) -> tuple[str, list[JsonObject]]:
    """The published algorithm: parent and unmatched suffix."""
    for prefix_length in range(len(messages), 0, -1):
        parent = nodes_by_hash.get(reference_hash(messages[:prefix_length], tools, kwargs))
        if parent is not None:
            return parent, messages[prefix_length:]
    return "root", messages


def reference_hash(messages: list[JsonObject], tools: list[JsonObject], kwargs: JsonObject) -> str:
    """One hash over everything."""
    state = {"messages": messages, "tools": tools, "chat_template_kwargs": kwargs}
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


# --- measuring -------------------------------------------------------------------------------------------------


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median CPU time of `run`."""
    return median_of_fresh_ms(lambda: None, lambda _: run(), repeats)


def median_of_fresh_ms(make: Callable[[], T], run: Callable[[T], object], repeats: int) -> float:
    """Median CPU time of `run` on something that is made anew each time, before the clock starts."""
    times = []
    for _ in range(repeats):
        made = make()
        start = time.thread_time()
        run(made)
        times.append(time.thread_time() - start)
    return statistics.median(times) * 1e3


@dataclass
class Generated:
    """What the engine was sent and returned in one turn of usual size."""

    serial: int

    def __post_init__(self) -> None:
        self.observation = array("i", range(OBSERVATION_TOKENS))
        self.token_ids = array("i", range(self.serial, self.serial + RESPONSE_TOKENS))
        self.logprobs = array("d", [-1.0 / (1 + index) for index in range(RESPONSE_TOKENS)])
        self.versions = (VersionSpan(version=WeightVersion("0"), n_tokens=RESPONSE_TOKENS),)

    def commit(self, forest: SessionForest, match: Match, answer: Message) -> None:
        """Commit it."""
        node = forest.commit(
            match,
            self.observation,
            message=answer,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish="stop",
        )
        forest.mark_delivered(node)


def play(forest: SessionForest, messages: Sequence[Message], tools: tuple[JsonObject, ...]) -> None:
    """Commit every answer in `messages` behind the history before it."""
    for index, message in enumerate(messages):
        if message.role == "assistant":
            Generated(index).commit(forest, forest.match(messages[:index], tools, {}), message)


def bench_request(raw: list[JsonObject], repeats: int) -> dict[str, float]:
    """One request with the whole history: where nothing is known, and where all but the last message is."""
    body = json.dumps({"messages": raw, "tools": TOOLS}).encode()
    tools, echoed, silent = canonical_tools(), canonical(raw), canonical(unechoed(raw))
    forest = SessionForest()
    play(forest, echoed, tools)
    for sent in (echoed, silent):
        assert len(forest.match(sent, tools, {}).new_messages) == 1, "the history is known"

    def parse() -> None:
        value = parse_json(body)
        assert isinstance(value, dict)
        normalize_messages(value["messages"])
        normalize_tools(value["tools"])

    def match(sent: tuple[Message, ...]) -> None:
        forest.match(sent, tools, {})

    known = {reference_hash(raw[:-1], TOOLS, {}): "node"}
    miss = {
        "body_kb": len(body) / 1e3,
        "parse_ms": median_ms(parse, repeats),
        "reference_miss_ms": median_ms(lambda: reference_match({}, raw, TOOLS, {}), max(1, repeats // 20)),
        "miss_ms": median_ms(lambda: SessionForest().match(echoed, tools, {}), repeats),
        "reference_known_ms": median_ms(lambda: reference_match(known, raw, TOOLS, {}), repeats),
        "known_ms": median_of_fresh_ms(lambda: canonical(raw), match, repeats),
        "known_unechoed_ms": median_of_fresh_ms(lambda: canonical(unechoed(raw)), match, repeats),
    }
    return {**miss, "ratio": miss["reference_miss_ms"] / miss["miss_ms"]}


class TimedForest(SessionForest):
    """A forest that measures by itself what a match takes to compare and hash the body."""

    recognized: Recognized | None = None

    def recognize(self, sent: Sequence[Message], tools: tuple[JsonObject, ...]) -> None:
        """Compare and hash a request that `match` is handed next."""
        self.recognized = self._index.recognize(self._root, self._tree(tools, {}).state, sent)

    def _longest(self, tree: Tree, messages: Sequence[Message]) -> tuple[Position, Recognized]:
        if self.recognized is None:
            return super()._longest(tree, messages)
        return self._index.longest(self.recognized, self._unechoed), self.recognized


def bench_turns(n_turns: int, n_bytes: int, *, echoes: bool) -> list[dict[str, float]]:
    """What each turn of a conversation costs, in microseconds; `n_bytes` is the JSON of the last request."""
    raw = conversation(2 * n_turns - 1, n_bytes)
    tools, whole = canonical_tools(), canonical(raw)
    forest, rows = TimedForest(), []
    for index in range(0, len(raw), 2):
        history = raw[: index + 1] if echoes else unechoed(raw[: index + 1])
        body = json.dumps(history)
        answer = whole[index + 1] if index + 1 < len(whole) else whole[1]
        generated = Generated(index)
        start = time.thread_time()
        sent = normalize_messages(parse_json(body))
        parsed = time.thread_time()
        forest.recognize(sent, tools)
        hashed = time.thread_time()
        match = forest.match(sent, tools, {})
        match_ms = median_ms(functools.partial(forest.match, sent, tools, {}), 5)
        before = time.thread_time()
        generated.commit(forest, match, answer)
        after = time.thread_time()
        prefix_ms = median_ms(functools.partial(forest.tokens, match.parent), 5)
        rows.append(
            {
                "parse_us": (parsed - start) * 1e6,
                "hash_us": (hashed - parsed) * 1e6,
                "match_us": match_ms * 1e3,
                "commit_us": (after - before) * 1e6,
                "prefix_us": prefix_ms * 1e3,
            }
        )
    assert len(forest.nodes) == 2 * n_turns + 1, "one line of turns"
    return rows


def around(rows: list[dict[str, float]], turn: int, width: int = 15) -> dict[str, float]:
    """Medians over the turns around `turn` (counted from 1)."""
    start = min(max(0, turn - 1 - width // 2), max(0, len(rows) - width))
    near = rows[start : start + width]
    medians = {name: statistics.median(row[name] for row in near) for name in rows[0]}
    return {"turn": turn, **medians, "beyond_us": medians["match_us"] + medians["commit_us"]}


def bench_growth(n_turns: int, n_bytes: int, *, echoes: bool, rounds: int) -> dict[str, float]:
    """Match and commit of one more turn behind 10 turns and behind `n_turns`, microseconds.

    By turns, and with both requests read before either is timed: so both meet the same machine and the same caches.
    """
    tools = canonical_tools()
    ends: list[tuple[TimedForest, list[JsonObject], list[float]]] = []
    for n in (10, n_turns):
        raw = conversation(2 * n + 1, n_bytes * n // n_turns)
        forest = TimedForest()
        play(forest, canonical(raw), tools)
        ends.append((forest, raw[:-1] if echoes else unechoed(raw[:-1]), []))
    for number in range(rounds):
        requests = []
        for forest, history, _ in ends:
            sent = canonical([*history, {"role": "user", "content": f"round {number}"}])
            forest.recognize(sent, tools)
            requests.append((sent, Generated(number), Message(role="assistant", content=f"answer {number}")))
        order = slice(None, None, 1 if number % 2 else -1)
        for (forest, _, times), (sent, generated, answer) in list(zip(ends, requests, strict=True))[order]:
            start = time.thread_time()
            generated.commit(forest, forest.match(sent, tools, {}), answer)
            times.append(time.thread_time() - start)
    first, last = (statistics.median(times) * 1e6 for _, _, times in ends)
    return {"turns": n_turns, "behind_10_us": first, "behind_all_us": last, "growth": last / first}


def bench_memory(n_turns: int) -> dict[str, float]:
    """Bytes that a conversation of `n_turns` keeps, its messages' text aside, which the request brought."""
    messages, tools = canonical(conversation(2 * n_turns + 1, 200 * n_turns)), canonical_tools()
    gc.collect()
    tracemalloc.start()
    forest = SessionForest()
    play(forest, messages, tools)
    gc.collect()
    n_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    last = forest.leaves()[0]
    arrays = sum(sys.getsizeof(node.token_ids) + sys.getsizeof(node.logprobs) for node in forest.nodes)
    joined = assemble(forest.lineage(last))
    exported = sum(sys.getsizeof(part) for part in (joined.tokens, joined.loss_mask, joined.logprobs))
    n_nodes = len(forest.nodes) - 1
    return {
        "tokens": last.total_len,
        "array_bytes_per_token": arrays / last.total_len,
        "bytes_per_token": n_bytes / last.total_len,
        "overhead_bytes_per_node": (n_bytes - arrays) / n_nodes,
        "exported_bytes_per_token": exported / last.total_len,
    }


# --- report ----------------------------------------------------------------------------------------------------


def bounds(request: dict[str, float], growths: dict[str, dict[str, float]], memory: dict[str, float]) -> list[dict]:
    """What must hold: name, measured, limit, ok."""
    checks = [
        ("CPU of a miss, reference / forest", request["ratio"], LEAST_RATIO, request["ratio"] >= LEAST_RATIO),
        *(
            (
                f"match of a known history, reasoning {kind}, ms",
                request[key],
                MOST_MATCH_MS,
                request[key] <= MOST_MATCH_MS,
            )
            for kind, key in (("echoed", "known_ms"), ("left out", "known_unechoed_ms"))
        ),
        *(
            (
                f"turn beyond parse and hash, behind {growth['turns']} turns / behind 10, reasoning {kind}",
                growth["growth"],
                MOST_GROWTH,
                growth["growth"] <= MOST_GROWTH,
            )
            for kind, growth in growths.items()
        ),
        *(
            (f"bytes per token, {what}", memory[key], MOST_BYTES, memory[key] <= MOST_BYTES)
            for what, key in (("in the forest", "bytes_per_token"), ("exported", "exported_bytes_per_token"))
        ),
    ]
    return [{"bound": name, "measured": value, "limit": limit, "ok": ok} for name, value, limit, ok in checks]


def print_tables(result: dict) -> None:
    """The result for a person, as Markdown."""
    print(f"Python {result['python']}, {result['cpus']} cores, one run; medians of CPU time.\n")
    request = result["request"]
    print(f"One request of {result['messages']} messages, {request['body_kb']:.0f} kB:\n")
    print("| | reference, ms | forest, ms | ratio |\n|---|---|---|---|")
    for name, theirs, ours in (
        ("nothing known", "reference_miss_ms", "miss_ms"),
        ("all but the last message known", "reference_known_ms", "known_ms"),
        ("the same, reasoning left out", "", "known_unechoed_ms"),
    ):
        first = (f"{request[theirs]:.2f}", f"{request[theirs] / request[ours]:.0f}") if theirs else ("–", "–")
        print(f"| {name} | {first[0]} | {request[ours]:.2f} | {first[1]} |")
    print(f"| parse and normalize the body | | {request['parse_ms']:.2f} | |\n")
    print("A turn in microseconds; to read is to compare and hash the body, and counts in no other column:\n")
    print("| reasoning | turn | parse | read | match | commit | match + commit | join the prefix |\n|" + "---|" * 8)
    for kind, rows in result["turns"].items():
        for row in rows:
            cells = ("parse_us", "hash_us", "match_us", "commit_us", "beyond_us", "prefix_us")
            print(f"| {kind} | {row['turn']} | " + " | ".join(f"{row[cell]:.0f}" for cell in cells) + " |")
    print()
    for kind, growth in result["growth"].items():
        print(
            f"One more turn, reasoning {kind}: {growth['behind_10_us']:.0f} µs behind 10 turns, "
            f"{growth['behind_all_us']:.0f} µs behind {growth['turns']}."
        )
    memory = result["memory"]
    print(
        f"\n{memory['tokens']:.0f} tokens: {memory['bytes_per_token']:.1f} bytes a token in the forest "
        f"({memory['array_bytes_per_token']:.1f} in arrays, {memory['overhead_bytes_per_node']:.0f} a node besides), "
        f"{memory['exported_bytes_per_token']:.1f} exported with mask and logprobs.\n"
    )
    print("| bound | measured | limit | |\n|---|---|---|---|")
    for check in result["bounds"]:
        verdict = "ok" if check["ok"] else "MISSED"
        print(f"| {check['bound']} | {check['measured']:.2f} | {check['limit']:g} | {verdict} |")


def measure(*, n_messages: int, n_bytes: int, n_turns: int, repeats: int) -> dict:
    """All of it."""
    request = bench_request(conversation(n_messages, n_bytes), repeats)
    depths = [turn for turn in (10, 50, 100, 200, 400) if turn < n_turns] + [n_turns]
    turns, growths, long_bytes = {}, {}, 2 * n_turns * n_bytes // n_messages
    for kind in ("echoed", "left out"):
        rows = bench_turns(n_turns, long_bytes, echoes=kind == "echoed")
        turns[kind] = [around(rows, turn) for turn in depths]
        growths[kind] = bench_growth(n_turns, long_bytes, echoes=kind == "echoed", rounds=min(repeats, 51))
    memory = bench_memory(n_turns)
    return {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "messages": n_messages,
        "request": request,
        "turns": turns,
        "growth": growths,
        "memory": memory,
        "bounds": bounds(request, growths, memory),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and say by the exit status whether every bound holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--messages", type=int, default=400, help="messages of the history")
    parser.add_argument("--kilobytes", type=int, default=770, help="size of the history")
    parser.add_argument("--turns", type=int, default=400, help="turns of the long conversation")
    parser.add_argument("--repeats", type=int, default=100, help="how often each thing is measured")
    args = parser.parse_args(argv)
    result = measure(n_messages=args.messages, n_bytes=1000 * args.kilobytes, n_turns=args.turns, repeats=args.repeats)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print_tables(result)
    return 0 if all(check["ok"] for check in result["bounds"]) else 1


if __name__ == "__main__":
    sys.exit(main())
