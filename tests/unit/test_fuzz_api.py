"""Some of the fuzzer's cases, and that it finds what it looks for. tools/nightly runs 20,000."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from relax_trio.data.request import CanonicalRequest
from relax_trio.errors import InvalidRequest
from relax_trio.runtime import session as session_module

N_CASES = 200


@pytest.fixture(scope="module")
def fuzzer():
    path = Path(__file__).parents[2] / "tools" / "fuzz_api.py"
    spec = importlib.util.spec_from_file_location("fuzz_api", path)
    module = sys.modules["fuzz_api"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def codec(fuzzer):
    return fuzzer.make_codec("qwen3")


def test_a_case_is_a_function_of_seed_and_number(fuzzer):
    corpus = fuzzer.load_corpus()
    cases = [fuzzer.make_case(corpus, 1, number) for number in range(50)]

    assert cases == [fuzzer.make_case(corpus, 1, number) for number in range(50)]
    assert cases != [fuzzer.make_case(corpus, 2, number) for number in range(50)]
    assert {case.path for case in cases} >= set(fuzzer.PATHS.values())


async def test_no_mutated_body_makes_the_server_fail_hang_or_keep_what_it_refused(fuzzer, codec):
    findings = await fuzzer.fuzz(codec, seed=7, first=0, cases=N_CASES)

    assert findings.found == []
    assert set(findings.statuses) == {200, 400}
    assert min(findings.statuses.values()) > N_CASES / 10
    assert findings.n_streams > 5


async def test_a_server_that_fails_is_found_with_the_case_that_shows_it(fuzzer, codec, monkeypatch):
    def broken(self, request: CanonicalRequest):
        raise KeyError("a bug")

    monkeypatch.setattr(session_module.Session, "submit", broken)
    findings = await fuzzer.fuzz(codec, seed=7, first=0, cases=20)

    assert findings.statuses[500] == len(findings.found) > 0
    assert "--seed 7 --first " in findings.found[0]
    assert "a bug" in findings.found[0]


async def test_a_refusal_that_leaves_a_trace_is_found(fuzzer, codec, monkeypatch):
    kept = session_module.run_request

    async def commits_then_refuses(call, session):
        await kept(call, session)
        raise InvalidRequest("refused too late")

    monkeypatch.setattr(session_module, "run_request", commits_then_refuses)
    findings = await fuzzer.fuzz(codec, seed=7, first=0, cases=20)

    assert any("the forest has grown" in found for found in findings.found)


@pytest.mark.parametrize(
    ("path", "envelope"),
    [
        ("/v1/messages", {"error": {"message": "m", "type": "t", "param": None, "code": None}}),
        ("/v1/responses", {"type": "error", "error": {"type": "t", "message": "m"}}),
        ("/v1/responses", {"error": {"message": "m" * 5000, "type": "t", "param": None, "code": None}}),
        ("/v1/messages", {"type": "error", "error": {"type": "t", "message": ""}}),
    ],
)
def test_a_wrong_envelope_is_found(fuzzer, path, envelope):
    case = fuzzer.Case(path, b"", {})

    assert fuzzer._wrong_refusal(case, json.dumps(envelope).encode()) is not None
