"""The benchmark of the forest on small inputs: that it measures what it says. Times themselves are nobody's test."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "tools" / "bench_forest.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_forest", PATH)
    module = sys.modules["bench_forest"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("n_messages", [1, 2, 7, 400])
def test_the_conversation_has_the_size_that_was_asked_for(bench, n_messages):
    raw = bench.conversation(n_messages, 20_000 + 100 * n_messages)
    messages = bench.canonical(raw)
    assert len(messages) == n_messages
    assert messages[-1].role == "user"
    assert 0.9 < len(json.dumps(raw)) / (20_000 + 100 * n_messages) < 1.1
    assert bench.canonical(bench.unechoed(raw))[-1] == messages[-1]
    assert all(message.reasoning_content for message in messages if message.role == "assistant")


def test_the_reference_finds_the_longest_known_prefix(bench):
    raw = bench.conversation(6, 2000)
    known = {bench.reference_hash(raw[:n], bench.TOOLS, {}): str(n) for n in (2, 4)}
    assert bench.reference_match(known, raw, bench.TOOLS, {}) == ("4", raw[4:])
    assert bench.reference_match({}, raw, bench.TOOLS, {}) == ("root", raw)
    assert bench.reference_match(known, raw, [], {}) == ("root", raw)


def test_a_small_run_gives_every_number_and_a_verdict_for_each_bound(bench, capsys):
    result = bench.measure(n_messages=8, n_bytes=4000, n_turns=12, repeats=3)
    assert set(result["turns"]) == {"echoed", "left out"}
    assert [row["turn"] for row in result["turns"]["echoed"]] == [10, 12]
    assert result["memory"]["tokens"] == 12 * 520
    assert 6 < result["memory"]["array_bytes_per_token"] < result["memory"]["bytes_per_token"]
    assert len(result["bounds"]) == 7
    json.dumps(result)
    bench.print_tables(result)
    assert capsys.readouterr().out.count("\n|") == sum([3 + 2 + 1, 4 + 2, 7 + 2])


@pytest.mark.parametrize("missed", [False, True])
def test_the_exit_status_says_whether_a_bound_was_missed(bench, monkeypatch, capsys, missed):
    real = bench.measure(n_messages=4, n_bytes=1000, n_turns=12, repeats=1)
    for check in real["bounds"]:
        check["ok"] = True
    real["bounds"][2]["ok"] = not missed
    asked = {}

    def measure(**sizes):
        asked.update(sizes)
        return real

    monkeypatch.setattr(bench, "measure", measure)
    assert bench.main(["--json", "--turns", "5", "--kilobytes", "3"]) == int(missed)
    assert json.loads(capsys.readouterr().out) == real
    assert asked == {"n_messages": 400, "n_bytes": 3000, "n_turns": 5, "repeats": 100}
    bench.main([])
    assert ("MISSED" in capsys.readouterr().out) is missed


def test_bounds_are_missed_on_their_own_side(bench):
    good = {"ratio": 100.0, "known_ms": 2.0, "known_unechoed_ms": 2.0}
    growths = {"echoed": {"turns": 400, "growth": 2.0}}
    memory = {"bytes_per_token": 20.0, "exported_bytes_per_token": 20.0}
    assert all(check["ok"] for check in bench.bounds(good, growths, memory))
    worse = bench.bounds(
        {"ratio": 99.0, "known_ms": 2.1, "known_unechoed_ms": 2.1},
        {"echoed": {"turns": 400, "growth": 2.1}},
        {"bytes_per_token": 21.0, "exported_bytes_per_token": 21.0},
    )
    assert not any(check["ok"] for check in worse)
