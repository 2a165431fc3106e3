"""Training runs on a real SGLang server, compared with what the server really answered."""

from __future__ import annotations

import pytest
from builders_commands import command, run, write_rows
from sglang_agreement import dumps, gaps, metrics_of, raw_turns, version_models, written_turns
from sglang_record import recorded_server

pytestmark = [pytest.mark.engine, pytest.mark.sglang_server]

N_STEPS = 10
ATOL = 1e-4
"""Float32 on both sides; kernels and batch widths differ."""


def session_of(rid):
    """The Session whose request it is."""
    return rid.rpartition(".")[0]


@pytest.fixture(scope="module")
def trained(sglang_server, tmp_path_factory):
    """Ten steps with attempts that are aborted at each step's end and go on under the next weights."""
    checkpoint, url = sglang_server
    home = tmp_path_factory.mktemp("trained")
    data = write_rows(home / "rows.jsonl", 64)
    with recorded_server(url) as (recording, record):
        words = command("train", checkpoint, data, home / "run", "--partial-rollout")
        sizes = ["--rollout-max-response-len", "64", "--rollout-max-context-len", "600", "--lr", "1e-3"]
        work = ["--num-rollout", str(N_STEPS), "--over-sampling-batch-size", "5"]
        work += ["--agent-env", "TURNS=2", "MAX_TOKENS=12", "SPREAD=4"]
        servers = ["--rollout-backend", "sglang", "--sglang-server", recording, "--agentic-session-lifecycle"]
        kept = ["--save", str(home / "saved"), "--save-interval", "1"]
        kept += ["--save-debug-rollout-data", str(home / "run" / "samples-{rollout_id}.jsonl")]
        done = run([*words, *sizes, *work, *servers, *kept], within_s=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return home, checkpoint, record


def test_attempts_were_aborted_and_resumed_and_turns_span_versions(trained):
    home, _, record = trained
    metrics = metrics_of(home / "run")
    assert len(metrics) == N_STEPS
    assert sum(step["rollout/n_aborted_attempts"] for step in metrics) > 0
    turns = [turn for dump in dumps(home / "run") for turn in written_turns(dump).values()]
    assert max(len({version for _, _, version in turn}) for turn in turns) > 1
    assert any(raw.n_legs > 1 for raw in raw_turns(record).values())


def test_every_token_logprob_and_version_is_what_the_server_answered_and_none_is_lost(trained):
    home, _, record = trained
    raw = raw_turns(record)
    written = {}
    for dump in dumps(home / "run"):
        written |= written_turns(dump)
    sessions = {session_of(rid) for rid in written}
    assert written == {rid: turn.tokens for rid, turn in raw.items() if session_of(rid) in sessions}
    assert "abort_timeout" not in (home / "run" / "run.log").read_text()


def test_logprobs_recomputed_with_the_recorded_versions_agree(trained):
    home, checkpoint, _ = trained
    models = version_models(checkpoint, home / "saved")
    found = [gap for dump in dumps(home / "run") for gap in gaps(dump, models)]
    assert len(found) > 1000
    assert max(found) < ATOL


def test_no_prefix_was_taken_from_a_cache_of_older_weights(trained):
    _, _, record = trained
    legs = record.legs()
    assert sum(leg.answer["meta_info"].get("cached_tokens", 0) for leg in legs) > 0
    assert len(record.of("/flush_cache")) >= N_STEPS
    assert record.stale_hits() == []


def test_the_server_was_told_of_every_session_that_ended(trained):
    home, _, record = trained
    closed = [exchange.request["session_id"] for exchange in record.of("/close_session")]
    metrics = metrics_of(home / "run")
    assert sum(step["agentic_kv/session/close_failure"] for step in metrics) == 0
    assert 0 < sum(step["agentic_kv/session/close"] for step in metrics) <= len(closed)
    assert len(set(closed)) == len(closed)
    ended = {session_of(rid) for dump in dumps(home / "run") for rid in written_turns(dump)}
    assert ended <= set(closed)
