"""A LoRA run on a real SGLang server that is sent the adapter alone, compared with what the server really answered."""

from __future__ import annotations

import pytest
from builders_adapter import RANK
from builders_commands import command, run, write_rows
from sglang_agreement import dumps, gaps, metrics_of, raw_turns, version_models, written_turns
from sglang_record import recorded_server

pytestmark = [pytest.mark.engine, pytest.mark.sglang_server]

N_STEPS = 4
ATOL = 1e-4
"""Float32 on both sides; the server adds the adapter's product, the plain model has it merged."""


@pytest.fixture(scope="module")
def trained(lora_server, tmp_path_factory):
    """Steps with attempts that are aborted at each step's end and go on under the next adapter."""
    checkpoint, url = lora_server
    home = tmp_path_factory.mktemp("trained")
    data = write_rows(home / "rows.jsonl", 40)
    with recorded_server(url) as (recording, record):
        words = command("train", checkpoint, data, home / "run", "--partial-rollout", "--num-rollout", str(N_STEPS))
        words += ["--rollout-max-response-len", "64", "--rollout-max-context-len", "600", "--lr", "1e-2"]
        words += ["--over-sampling-batch-size", "5", "--agent-env", "TURNS=2", "MAX_TOKENS=12", "SPREAD=4"]
        words += ["--rollout-backend", "sglang", "--sglang-server", recording]
        words += ["--lora-rank", str(RANK), "--sglang-lora-transfer", "adapter"]
        words += ["--save", str(home / "saved"), "--save-interval", "1"]
        words += ["--save-debug-rollout-data", str(home / "run" / "samples-{rollout_id}.jsonl")]
        done = run(words, within_s=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return home, checkpoint, record


def test_only_adapters_reach_the_server_and_old_ones_leave_it(trained):
    home, _, record = trained
    assert len(metrics_of(home / "run")) == N_STEPS
    assert len(record.of("/update_weights_from_disk")) == 1  # at the start
    assert len(record.of("/load_lora_adapter")) == N_STEPS
    assert len(record.of("/unload_lora_adapter")) == N_STEPS - 1


def test_logprobs_recomputed_with_the_adapter_of_each_tokens_version_agree(trained):
    home, checkpoint, _ = trained
    found = dumps(home / "run")
    models = version_models(checkpoint, home / "saved")
    differences = [gap for dump in found for gap in gaps(dump, models)]
    assert len(differences) > 300
    assert max(differences) < ATOL
    turns = [turn for dump in found for turn in written_turns(dump).values()]
    assert max(len({version for _, _, version in turn}) for turn in turns) > 1


def test_every_token_is_what_the_server_answered(trained):
    home, _, record = trained
    raw = raw_turns(record)
    written = {}
    for dump in dumps(home / "run"):
        written |= written_turns(dump)
    assert written == {rid: raw[rid].tokens for rid in written}


def test_no_prefix_came_from_the_cache_of_another_adapter_though_nothing_was_flushed(trained):
    _, _, record = trained
    assert sum(leg.answer["meta_info"].get("cached_tokens", 0) for leg in record.legs()) > 0
    assert len(record.of("/flush_cache")) == 1  # at the start
    assert record.foreign_hits() == []
