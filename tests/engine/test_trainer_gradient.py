"""The trainer's gradient and logprobs on tiny random models, against the formula and unpadded passes."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from builders_train import (
    VOCAB,
    flat_gradient,
    off_policy,
    relative,
    rollout,
    settings,
    tiny_model,
)

from relax_trio.train.phase import run_phase
from relax_trio.train.policy import Distribution, Policy
from relax_trio.train.recompute import logprob_gap, recompute_logprobs
from relax_trio.train.update import Updater

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_torch_thread")]


def plain_gradient(model, samples, *, temperature=1.0, eps=0.2):
    """The same from the definition: one row at a time, full logits, no padding, autograd over scalars."""
    n_of = {}
    for s in samples:
        n_of[s.index] = n_of.get(s.index, 0) + sum(s.loss_mask)
    model.zero_grad()
    total = 0.0
    for s in samples:
        log_probs = (model(torch.tensor([list(s.tokens)])).logits[0] / temperature).log_softmax(-1)
        start = len(s.tokens) - s.response_length
        for t, trained in enumerate(s.loss_mask):
            if trained:
                ratio = (log_probs[start + t - 1, s.tokens[start + t]] - s.rollout_log_probs[t]).exp()
                surrogate = torch.min(ratio * s.advantage, ratio.clamp(1 - eps, 1 + eps) * s.advantage)
                total = total - surrogate / (n_of[s.index] * len(n_of))
    total.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return gradient, float(total.detach())


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_is_that_of_the_formula_over_unpadded_rows(kind, temperature):
    model = tiny_model(kind).double()
    samples = off_policy(rollout(model, 6, temperature=temperature))
    expected, loss = plain_gradient(model, samples, temperature=temperature)
    distribution = Distribution(temperature=temperature)
    gradient, metrics = flat_gradient(Policy(model), samples, distribution=distribution, micro_batch_size=4)
    assert relative(gradient, expected) < 1e-6
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-6)
    in_float32, _ = flat_gradient(Policy(model.float()), samples, distribution=distribution, micro_batch_size=4)
    assert relative(in_float32, expected) < 1e-5


@pytest.mark.parametrize("per_token", [False, True])
def test_any_split_into_micro_batches_has_the_gradient_of_one_batch(per_token):
    model = tiny_model().double()
    samples = off_policy(rollout(model, 9))
    whole, metrics = flat_gradient(Policy(model), samples, micro_batch_size=9, calculate_per_token_loss=per_token)
    for size in (1, 2, 4):
        split, split_metrics = flat_gradient(
            Policy(model), samples, micro_batch_size=size, calculate_per_token_loss=per_token
        )
        assert relative(split, whole) < 1e-6
        assert split_metrics == pytest.approx(metrics, rel=1e-6)
    assert metrics["train/n_tokens"] == sum(sum(s.loss_mask) for s in samples)


def test_splitting_a_session_into_contexts_leaves_the_gradient_as_it_was():
    model = tiny_model().double()
    samples = [evolve(s, index=i) for i, s in enumerate(off_policy(rollout(model, 4)))]
    whole, _ = flat_gradient(Policy(model), samples)
    halves = []
    for s in samples:
        middle = s.response_length // 2
        for first, last in ((0, middle), (middle, s.response_length)):
            mask = [int(m and first <= t < last) for t, m in enumerate(s.loss_mask)]
            halves.append(evolve(s, loss_mask=bytearray(mask)))
    split, _ = flat_gradient(Policy(model), halves)
    assert relative(split, whole) < 1e-6


def test_logits_computed_in_chunks_have_the_same_gradient():
    model = tiny_model("llama").double()
    samples = rollout(model, 5)
    whole, metrics = flat_gradient(Policy(model), samples)
    chunked, chunked_metrics = flat_gradient(Policy(model, chunk_elements=3 * VOCAB), samples)
    assert relative(chunked, whole) < 1e-6
    assert chunked_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2"])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_recomputed_logprobs_equal_those_of_unpadded_rollout(kind, temperature):
    model = tiny_model(kind)
    samples = rollout(model, 7, temperature=temperature)
    found = recompute_logprobs(model, samples, temperature=temperature, micro_batch_size=3)
    assert [len(row) for row in found] == [s.response_length for s in samples]
    assert logprob_gap(samples, found) < 1e-5
    assert all(
        v == 0.0 for row, s in zip(found, samples, strict=True) for v, m in zip(row, s.loss_mask, strict=True) if not m
    )


def test_recomputing_with_other_weights_shows_a_gap(checkpoint):
    samples = rollout(tiny_model(), 3)
    assert logprob_gap(samples, recompute_logprobs(checkpoint, samples, temperature=1.0)) < 1e-5
    assert logprob_gap(samples, recompute_logprobs(tiny_model(seed=5), samples, temperature=1.0)) > 0.1
    assert logprob_gap(samples, recompute_logprobs(checkpoint, samples, temperature=0.5)) > 0.1


async def test_clip_grad_bounds_the_gradient_and_tells_its_norm_before(checkpoint):
    model = tiny_model()
    samples = rollout(model, 6)
    gradient, _ = flat_gradient(Policy(model), samples)
    for clip in (0.0, 1e-3):
        updater = Updater(Policy(tiny_model()), settings(clip_grad=clip))
        applied = []
        updater._optimizer.register_step_pre_hook(
            lambda optimizer, *_, applied=applied: applied.extend(
                p.grad.norm() for group in optimizer.param_groups for p in group["params"]
            )
        )
        metrics = run_phase(updater, samples, lambda: None).metrics
        assert metrics["train/grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-4)
        assert float(torch.stack(applied).norm()) == pytest.approx(clip or float(gradient.norm()), rel=1e-2)
