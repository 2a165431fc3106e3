"""The trainer on tiny random models: learning, skipping, cancellation, save and resume."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
import trio
from attrs import evolve
from builders_train import (
    CPU,
    VOCAB,
    cancel_at_score,
    make_sample,
    off_policy,
    rollout,
    same_tensors,
    settings,
    tiny_model,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from relax_trio.errors import ConfigError, TrainError
from relax_trio.sync.cpu import InlineCpuPool
from relax_trio.train.checkpoint import find_latest, load_state
from relax_trio.train.phase import run_phase
from relax_trio.train.policy import Policy
from relax_trio.train.pretrained import load_model
from relax_trio.train.recompute import recompute_logprobs
from relax_trio.train.stats import GAP_METRICS
from relax_trio.train.trainer import open_trainer
from relax_trio.train.update import Updater

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_torch_thread")]


async def test_a_phase_tells_its_metrics_and_makes_the_next_version(checkpoint):
    trainer = await open_trainer(settings(lr=2e-3), checkpoint)
    samples = rollout(tiny_model(), 8)
    before = trainer.weights().tensors
    kept = {name: t.clone() for name, t in before.items()}
    assert trainer.weight_version == "0"
    metrics = await trainer.step(0, samples)
    assert trainer.weight_version == "1"
    assert metrics["train/rollout_logprob_abs_diff"] < 1e-5
    assert metrics["train/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/ppo_kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["train/pg_clipfrac"] == 0.0
    assert 0 < metrics["train/entropy"] < math.log(VOCAB)
    assert metrics["train/grad_norm"] > 0
    assert metrics["train/lr"] == 2e-3
    assert metrics["train/n_tokens"] == sum(sum(s.loss_mask) for s in samples)
    assert (metrics["train/n_samples"], metrics["train/n_optimizer_steps"]) == (8, 1)
    assert all(torch.equal(before[name], kept[name]) for name in kept), "published weights never change"
    after = trainer.weights().tensors
    assert after.keys() == before.keys() == dict(tiny_model().named_parameters()).keys()
    assert not any(torch.equal(after[name], kept[name]) for name in kept)
    assert trainer.weights() is trainer.weights()


async def test_the_gap_to_rollout_is_taken_before_any_weight_changes(checkpoint):
    samples = rollout(tiny_model(), 8)
    trainer = await open_trainer(settings(lr=0.05, global_batch_size=1), checkpoint)
    metrics = await trainer.step(0, samples)
    assert metrics["train/n_optimizer_steps"] == 4  # Sessions, two rows each
    assert metrics["train/rollout_logprob_abs_diff"] < 1e-5
    assert metrics["train/pg_clipfrac"] > 0.1, "later optimizer steps are off-policy"
    assert trainer.weight_version == "1"


async def test_the_gap_to_rollout_covers_the_rows_of_every_optimizer_step(checkpoint):
    samples = rollout(tiny_model(), 8)
    n_tokens = sum(sum(s.loss_mask) for s in samples)
    odd = next(s for s in reversed(samples) if any(s.loss_mask))
    odd.rollout_log_probs[next(t for t, trained in enumerate(odd.loss_mask) if trained)] -= 0.5
    for size in (1, None):
        trainer = await open_trainer(settings(lr=0.05, global_batch_size=size), checkpoint)
        metrics = await trainer.step(0, samples)
        assert metrics["train/n_optimizer_steps"] == (4 if size else 1)
        assert metrics["train/rollout_logprob_abs_diff"] == pytest.approx(0.5, abs=1e-5)
        assert metrics["train/rollout_logprob_abs_diff_mean"] == pytest.approx(0.5 / n_tokens, abs=1e-5)


@pytest.mark.parametrize("n_bad", [1, 2])
async def test_the_gap_to_rollout_is_infinite_where_a_logprob_is_not_a_number(checkpoint, monkeypatch, n_bad):
    """Whether the rows with it are those of the first optimizer step (scored second) or of the other one."""
    score, calls = Policy.score, []

    def broken(self, batch, distribution):
        calls.append(batch)
        logprobs, entropy = score(self, batch, distribution)
        return (logprobs * math.nan if len(calls) == n_bad else logprobs), entropy

    monkeypatch.setattr(Policy, "score", broken)
    trainer = await open_trainer(settings(global_batch_size=1), checkpoint)
    metrics = await trainer.step(0, rollout(tiny_model(), 4))
    assert len(calls) == 3
    assert {name for name, value in metrics.items() if not math.isfinite(value)} == set(GAP_METRICS)
    assert all(metrics[name] == math.inf for name in GAP_METRICS)
    assert metrics["train/n_skipped_steps"] == n_bad - 1


@pytest.mark.parametrize("advantage", [1.0, -1.0])
async def test_a_token_with_advantage_gets_more_likely_and_one_with_negative_advantage_less(checkpoint, advantage):
    trainer = await open_trainer(settings(lr=3e-3), checkpoint)
    model = tiny_model()
    prompt, token = [3, 1, 4], 15
    log_probs = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    history = [float(log_probs[token].detach())]
    for step in range(4):
        sample = make_sample([*prompt, token], [1], advantage=advantage, logprobs=[history[-1]])
        await trainer.step(step, [sample])
        model.load_state_dict(trainer.weights().tensors, strict=False)
        history.append(recompute_logprobs(model, [sample], temperature=1.0)[0][0])
    assert history == sorted(history, reverse=advantage < 0)
    assert abs(history[-1] - history[0]) > 0.1


async def test_a_learning_rate_of_zero_changes_no_bit(checkpoint):
    trainer = await open_trainer(settings(lr=0.0), checkpoint)
    before = trainer.weights().tensors
    await trainer.step(0, rollout(tiny_model(), 4))
    after = trainer.weights().tensors
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_weight_decay_shrinks_matrices_and_leaves_norm_scales_alone():
    model = tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    samples = [evolve(sample, advantage=0.0) for sample in rollout(model, 2)]  # no gradient
    run_phase(Updater(Policy(model), settings(lr=0.1, weight_decay=0.5)), samples, lambda: None)
    for name, parameter in model.named_parameters():
        kept = 1.0 if parameter.dim() < 2 else 1.0 - 0.1 * 0.5
        assert torch.allclose(parameter, before[name] * kept), name


async def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(checkpoint, events):
    model = tiny_model()
    samples = rollout(model, 4)
    trainer = await open_trainer(settings(global_batch_size=1), checkpoint)
    updater = trainer._updater
    parameter = next(updater.policy.model.parameters())
    broken = iter([True, False])
    parameter.register_hook(lambda g: g * math.nan if next(broken) else g)
    metrics = await trainer.step(7, samples)
    assert (metrics["train/n_skipped_steps"], metrics["train/n_optimizer_steps"]) == (1, 1)
    assert all(math.isfinite(v) for v in metrics.values())
    assert [(e.name, e.fields["rollout"], e.fields["step"]) for e in events] == [("optimizer_step.skipped", 7, 0)]
    assert all(t.isfinite().all() for t in trainer.weights().tensors.values())

    before = trainer.weights().tensors
    broken = iter([True, True])
    metrics = await trainer.step(8, samples)
    assert (metrics["train/n_skipped_steps"], metrics["train/n_optimizer_steps"]) == (2, 0)
    assert all(math.isfinite(v) for v in metrics.values())
    assert all(torch.equal(before[name], t) for name, t in trainer.weights().tensors.items())
    assert trainer.weight_version == "2"


async def test_rows_the_model_cannot_read_are_refused_before_training(checkpoint):
    trainer = await open_trainer(settings(), checkpoint)
    with pytest.raises(TrainError, match=f"from 1 to {VOCAB}, but the trained model has {VOCAB} tokens"):
        await trainer.step(0, [make_sample([1, VOCAB], [1])])
    with pytest.raises(TrainError, match="none of the 1 rows"):
        await trainer.step(0, [make_sample([1, 2], [0])])
    with pytest.raises(TrainError, match="none of the 0 rows"):
        await trainer.step(0, [])
    assert trainer.weight_version == "0"


async def test_deterministic_training_does_not_depend_on_the_order_of_arrival(checkpoint):
    samples = [evolve(s, group_index=i // 4, index=i) for i, s in enumerate(rollout(tiny_model(), 8))]
    results = []
    for arrival in (samples, samples[::-1]):
        trainer = await open_trainer(settings(deterministic=True, global_batch_size=4, micro_batch_size=2), checkpoint)
        results.append((await trainer.step(0, arrival), trainer.weights().tensors))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], t) for name, t in results[1][1].items())


async def test_a_cancelled_phase_ends_after_the_micro_batch_at_work_and_leaves_the_old_weights(checkpoint, monkeypatch):
    trainer = await open_trainer(settings(micro_batch_size=1), checkpoint)
    before = trainer.weights().tensors
    n_scored = cancel_at_score(1, monkeypatch, scope := trio.CancelScope())
    with scope:
        await trainer.step(0, rollout(tiny_model(), 4))
    assert scope.cancelled_caught
    assert len(n_scored) == 1, "the phase ends after the micro-batch at work"
    assert trainer.weight_version == "0"
    assert trainer.weights().tensors is before
    monkeypatch.undo()
    fresh = await open_trainer(settings(micro_batch_size=1), checkpoint)
    samples = rollout(tiny_model(), 4)
    assert await trainer.step(0, samples) == await fresh.step(0, samples)


async def test_a_cancel_between_two_optimizer_steps_undoes_the_first(checkpoint, monkeypatch):
    config = settings(micro_batch_size=2, global_batch_size=1)
    trainer, fresh = await open_trainer(config, checkpoint), await open_trainer(config, checkpoint)
    first, second = rollout(tiny_model(), 6), rollout(tiny_model(), 6, seed=1)
    assert await trainer.step(0, first) == await fresh.step(0, first)
    n_measured = 2  # the rows of the second and third optimizer step are measured first
    n_scored = cancel_at_score(n_measured + 2, monkeypatch, scope := trio.CancelScope())
    with scope:
        await trainer.step(1, second)
    assert scope.cancelled_caught
    assert len(n_scored) == n_measured + 2
    assert trainer.weight_version == "1"
    monkeypatch.undo()
    assert await trainer.step(1, second) == await fresh.step(1, second), "weights, moments and step count are back"
    assert same_tensors(trainer.weights(), fresh.weights())


async def test_a_cancel_in_the_last_micro_batch_lets_the_phase_end(checkpoint, monkeypatch):
    trainer = await open_trainer(settings(micro_batch_size=2, global_batch_size=1), checkpoint)
    n_measured = 2
    n_scored = cancel_at_score(n_measured + 3, monkeypatch, scope := trio.CancelScope())
    with scope:
        metrics = await trainer.step(0, rollout(tiny_model(), 6))
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert metrics["train/n_optimizer_steps"] == len(n_scored) - n_measured == 3
    assert trainer.weight_version == "1"


async def test_a_resumed_run_computes_the_same_losses_and_weights_bit_by_bit(checkpoint, tmp_path):
    phases = [off_policy(rollout(tiny_model(), 6, seed=seed), seed=seed) for seed in range(5)]
    config = settings(lr_warmup_iters=3, weight_decay=0.1, global_batch_size=2, deterministic=True)
    unbroken = await open_trainer(config, checkpoint)
    losses = [await unbroken.step(i, samples) for i, samples in enumerate(phases)]

    first = await open_trainer(config, checkpoint)
    again = [await first.step(i, phases[i]) for i in range(2)]
    await first.save(tmp_path, {"rollout_id": 1, "data": {"epoch": 0, "position": 12}})
    random = torch.rand(3)
    found = find_latest(tmp_path)
    assert load_state(found) == {"rollout_id": 1, "data": {"epoch": 0, "position": 12}}
    second = await open_trainer(config, checkpoint, resume=found)
    assert torch.equal(torch.rand(3), random), "torch's random state is part of the checkpoint"
    assert second.weight_version == "2"
    again += [await second.step(i, phases[i]) for i in range(2, 5)]

    assert again == losses
    final, expected = second.weights().tensors, unbroken.weights().tensors
    assert all(torch.equal(final[name], expected[name]) for name in expected)


async def test_a_checkpoint_is_a_hugging_face_model_with_its_tokenizer(checkpoint, tmp_path, events):
    trainer = await open_trainer(settings(), checkpoint)
    await trainer.step(0, rollout(tiny_model(), 4))
    path = await trainer.save(tmp_path, {"rollout_id": 0})
    assert path == tmp_path / "step_000001"
    assert [(e.name, e.fields["version"]) for e in events] == [("checkpoint.saved", "1")]
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer("w3").input_ids == [3]
    assert tokenizer.chat_template == "{{ messages }}"
    weights = trainer.weights().tensors
    assert all(torch.equal(p.detach(), weights[name]) for name, p in model.named_parameters())
    next_run = await open_trainer(settings(), path)
    assert next_run.weight_version == "0", "as --hf-checkpoint it is a model to begin from"


async def test_a_damaged_or_foreign_checkpoint_is_refused_by_file(checkpoint, tmp_path):
    trainer = await open_trainer(settings(), checkpoint)
    path = await trainer.save(tmp_path / "a", {})
    content = (path / "trainer.pt").read_bytes()
    (path / "trainer.pt").write_bytes(b"\0" * len(content))
    with pytest.raises(ConfigError, match=r"trainer\.pt cannot be resumed from"):
        await open_trainer(settings(), checkpoint, resume=path)
    (path / "trainer.pt").write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=r"trainer\.pt has \d+ bytes instead of"):
        await open_trainer(settings(), checkpoint, resume=path)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        await open_trainer(settings(), tmp_path / "missing")
    other = Updater(Policy(tiny_model("llama")), settings())
    run_phase(other, rollout(tiny_model(), 2), lambda: None)
    mine = Updater(Policy(load_model(checkpoint, CPU)), settings())
    with pytest.raises(ValueError, match="size of optimizer's group"):
        mine.restore(other.state())


async def test_resuming_with_another_learning_rate_uses_the_new_one(checkpoint, tmp_path):
    samples = rollout(tiny_model(), 4)
    trainer = await open_trainer(settings(lr=1e-3), checkpoint)
    await trainer.step(0, samples)
    path = await trainer.save(tmp_path, {})
    resumed = await open_trainer(settings(lr=0.0, weight_decay=0.5), checkpoint, resume=path)
    before = resumed.weights().tensors
    assert (await resumed.step(1, samples))["train/lr"] == 0.0
    assert all(torch.equal(before[name], t) for name, t in resumed.weights().tensors.items())


async def test_the_trainer_runs_in_place_for_tests_without_threads(checkpoint):
    trainer = await open_trainer(settings(), checkpoint, pool=InlineCpuPool())
    assert (await trainer.step(0, rollout(tiny_model(), 2)))["train/n_optimizer_steps"] == 1


async def test_a_phase_that_fails_halfway_is_undone_and_can_be_saved_and_tried_again(checkpoint, tmp_path, monkeypatch):
    trainer = await open_trainer(settings(global_batch_size=1), checkpoint)
    samples, score, calls = rollout(tiny_model(), 4), Policy.score, []

    def failing(self, batch, distribution):
        calls.append(batch)
        if len(calls) == 3:  # measured, first optimizer step, second one
            raise RuntimeError("out of memory")
        return score(self, batch, distribution)

    monkeypatch.setattr(Policy, "score", failing)
    with pytest.raises(TrainError, match="rollout step 3 failed: RuntimeError: out of memory"):
        await trainer.step(3, samples)
    assert trainer.weight_version == "0"
    path = await trainer.save(tmp_path, {})
    saved = dict(load_model(path, CPU).named_parameters())
    assert all(torch.equal(saved[name], t) for name, t in tiny_model().named_parameters())
    fresh = await open_trainer(settings(global_batch_size=1), checkpoint)
    assert await trainer.step(3, samples) == await fresh.step(3, samples)


@pytest.mark.parametrize("size", [1, None])
async def test_a_phase_that_fails_after_its_last_optimizer_step_is_undone_too(checkpoint, monkeypatch, size):
    config = settings(global_batch_size=size)
    trainer, fresh = await open_trainer(config, checkpoint), await open_trainer(config, checkpoint)
    first, second = rollout(tiny_model(), 4), rollout(tiny_model(), 4, seed=1)
    assert await trainer.step(0, first) == await fresh.step(0, first)

    def failing(model):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("relax_trio.train.update.snapshot", failing)
    with pytest.raises(TrainError, match="out of memory"):
        await trainer.step(1, second)
    monkeypatch.undo()
    assert trainer.weight_version == "1"
    assert await trainer.step(1, second) == await fresh.step(1, second)
    assert same_tensors(trainer.weights(), fresh.weights()), "weights, moments and step count are back"


async def test_a_checkpoint_that_lacks_a_tensor_is_refused_not_filled_with_noise(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "hf")
    weights = load_file(tmp_path / "hf/model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks model\.norm\.weight"):
        await open_trainer(settings(), tmp_path / "hf")
