"""Logprobs and schedule against formulas written out token by token in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_trio.backend.embedded.sampling import Draw, sampling_log_probs
from relax_trio.config.tree import RolloutConfig, TrainConfig
from relax_trio.errors import ConfigError
from relax_trio.train.policy import Distribution
from relax_trio.train.schedule import learning_rate, n_optimizer_steps


def naive_log_probs(logits, recorded, temperature, top_p, top_k):
    """Sampling distribution of one row, in plain Python."""
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    kept = order if top_k <= 0 else order[:top_k]
    mass = {v: math.exp((logits[v] - max(logits)) / temperature) for v in kept}
    total, before, support = sum(mass.values()), 0.0, set()
    for v in kept:
        if before < top_p:
            support.add(v)
        before += mass[v] / total
    support.add(recorded)
    norm = sum(math.exp((logits[v] - max(logits)) / temperature) for v in support)
    return {v: (logits[v] - max(logits)) / temperature - math.log(norm) for v in support}


@given(
    st.lists(st.floats(-5, 5), min_size=4, max_size=9, unique=True),
    st.integers(0, 3),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([0.31, 0.77, 1.0]),
    st.sampled_from([-1, 1, 2, 3, 50]),
)
def test_log_softmax_is_the_sampling_distribution_and_always_holds_the_recorded_token(
    logits, recorded, temperature, top_p, top_k
):
    distribution = Distribution(temperature=temperature, top_p=top_p, top_k=top_k)
    found = distribution.log_softmax(torch.tensor([logits], dtype=torch.float64), torch.tensor([recorded]))[0]
    expected = naive_log_probs(logits, recorded, temperature, top_p, top_k)
    assert {v for v in range(len(logits)) if math.isfinite(found[v])} == set(expected)
    for v, value in expected.items():
        assert float(found[v]) == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, -1), (0.7, 0.9, -1), (1.3, 0.8, 20), (0, 0.5, 3)]
)
def test_training_takes_logprobs_of_the_distribution_that_the_embedded_engine_samples_from(temperature, top_p, top_k):
    logits = torch.randn(32, 100, generator=torch.Generator().manual_seed(0)) * 3
    n = len(logits)
    draw = Draw(
        temperature=np.full(n, temperature, np.float32),
        top_p=np.full(n, top_p, np.float32),
        top_k=np.full(n, top_k, np.int64),
        seed=np.zeros(n, np.uint64),
        position=np.zeros(n, np.int64),
    )
    engine = sampling_log_probs(logits, draw)
    rollout = RolloutConfig(rollout_temperature=temperature, rollout_top_p=top_p, rollout_top_k=top_k)
    training = Distribution.of_rollout(rollout).log_softmax(logits, logits.argmax(dim=-1))
    assert torch.equal(engine.isfinite(), training.isfinite())
    assert torch.allclose(engine.exp(), training.exp(), atol=1e-6)


def test_gradient_of_a_logprob_by_the_logits_is_one_minus_softmax_over_temperature():
    logits = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    recorded = torch.tensor([1, 0, 6])
    log_probs = Distribution(temperature=0.6).log_softmax(logits, recorded).gather(1, recorded[:, None])
    (gradient,) = torch.autograd.grad(log_probs.sum(), logits)
    one_hot = torch.nn.functional.one_hot(recorded, 7)
    assert torch.allclose(gradient, (one_hot - (logits / 0.6).softmax(-1)) / 0.6, rtol=1e-10)


def test_a_truncated_distribution_has_a_finite_gradient_when_the_recorded_token_is_outside_the_nucleus():
    logits = torch.tensor([[9.0, 0.0, -9.0]], requires_grad=True)
    log_probs = Distribution(top_p=0.5).log_softmax(logits, torch.tensor([2]))
    (gradient,) = torch.autograd.grad(log_probs[0, 2], logits)
    assert gradient.isfinite().all()
    assert gradient[0, 1] == 0.0


def test_learning_rate_warms_up_then_decays_to_zero():
    def rates(style):
        config = TrainConfig(lr=1.0, lr_warmup_iters=2, lr_decay_style=style)
        return [learning_rate(config, step, 6) for step in range(8)]

    assert rates("constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates("linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    cosine = [(1 + math.cos(math.pi * x)) / 2 for x in (0, 0.25, 0.5, 0.75, 1, 1)]
    assert rates("cosine") == pytest.approx([0.5, 1.0, *cosine])


def test_a_decay_without_an_end_is_refused():
    with pytest.raises(ConfigError, match="--num-rollout"):
        learning_rate(TrainConfig(lr_decay_style="cosine"), 0, None)


def test_optimizer_steps_of_a_run_count_the_remainder_of_each_rollout_step():
    rollout = RolloutConfig(rollout_batch_size=4, n_samples_per_prompt=8)
    assert n_optimizer_steps(rollout, TrainConfig(), 5) == 5
    assert n_optimizer_steps(rollout, TrainConfig(global_batch_size=12), 5) == 15
