"""Exports of real runs against the model: what is trained is what was generated, under the weights recorded."""

from __future__ import annotations

import math

import pytest
from builders_checkpoint import save_tiny_checkpoint
from builders_commands import command, run, write_rows

from relax_trio.observe.dump import read_rollout_dump
from relax_trio.observe.metrics import read_metrics
from relax_trio.tokens.codec import ChatCodec
from relax_trio.train.recompute import logprob_gap, recompute_logprobs

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    """Three steps of three turns with a large learning rate, a checkpoint after each, every sample dumped."""
    home = tmp_path_factory.mktemp("trained")
    words = command("train", checkpoint, write_rows(home / "d.jsonl", 6), home / "run", "--lr", "1e-2")
    words += ["--save-interval", "1", "--save-debug-rollout-data", str(home / "dump-{rollout_id}.jsonl")]
    done = run([*words, "--agent-env", "TURNS=3"])
    assert done.returncode == 0, done.stderr
    return home


def dump(home, step):
    return read_rollout_dump(home / f"dump-{step}.jsonl").samples


def test_logprobs_recomputed_with_the_recorded_version_match(checkpoint, trained):
    for step in range(3):
        samples = dump(trained, step)
        assert {span.version for sample in samples for span in sample.weight_versions} == {str(step)}
        weights = checkpoint if step == 0 else trained / "run" / "checkpoints" / f"step_{step:06d}"

        gap = logprob_gap(samples, recompute_logprobs(weights, samples, temperature=1.0))

        assert gap <= 1e-3


def test_other_weights_do_not_match(checkpoint, trained):
    """The check above can fail: a large step changed the weights."""
    samples = dump(trained, 2)

    assert logprob_gap(samples, recompute_logprobs(checkpoint, samples, temperature=1.0)) > 1e-2


def test_every_step_reports_its_largest_gap(trained):
    gaps = [record["train/rollout_logprob_abs_diff"] for record in read_metrics(trained / "run")]

    assert len(gaps) == 3
    assert all(0 <= gap <= 1e-3 for gap in gaps)


def test_samples_hold_what_was_generated_and_nothing_else(checkpoint, trained):
    codec = ChatCodec.load(checkpoint, reasoning_parser=None, tool_call_parser=None)
    for sample in dump(trained, 1):
        assert len(sample.turn_lens) == 3
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
        assert sum(sample.loss_mask) == sum(sample.turn_lens) == sum(s.n_tokens for s in sample.weight_versions)
        for masked, logprob in zip(sample.loss_mask, sample.rollout_log_probs, strict=True):
            assert math.isfinite(logprob)
            assert masked or logprob == 0.0
        # Between the generated turns stands the template's own text, end-of-turn tokens of cut turns included.
        opening = codec.encode_opening(sample.messages[:1], (), {})
        assert sample.tokens[: len(opening)] == opening


def test_deterministic_runs_sample_the_same_tokens(checkpoint, tmp_path):
    """Whatever the order in which agents connect."""
    data = write_rows(tmp_path / "d.jsonl", 4)
    seen = []
    for name in ("a", "b"):
        words = command("rollout", checkpoint, data, tmp_path / name, "--deterministic", "--agent-env", "TURNS=2")
        done = run([*words, "--rollout-max-context-len", "256"])
        assert done.returncode == 0, done.stderr
        samples = [s for step in range(2) for s in read_rollout_dump(tmp_path / name / f"rollout/{step}.jsonl").samples]
        seen.append([(s.place, list(s.tokens), list(s.rollout_log_probs), s.reward) for s in samples])

    assert seen[0] == seen[1]
    assert len({tuple(tokens) for _, tokens, _, _ in seen[0]}) > 1
