"""Losses, KL estimates and corrections against the published formulas, written out in plain Python floats.

A gradient is checked against a derivation of its own: none of these formulas is differentiated by torch in the tests.
"""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_trio.train.importance import importance_ratios, kept_by_sequence, masked_weights, truncated_weights
from relax_trio.train.kl import kl_estimate
from relax_trio.train.loss import clipped_losses, kl_sum, sequence_log_ratios, truncated_policy_losses

LOW, HIGH, DUAL = 0.2, 0.3, 1.6
CLIPS = {"eps_low": LOW, "eps_high": HIGH}
KINKS = (math.log(1 - LOW), math.log(1 + HIGH), math.log(DUAL), 0.0)

logprob = st.floats(-4, -0.01)
tokens = st.lists(st.tuples(logprob, logprob, st.floats(-3, 3), st.integers(0, 3)), min_size=1, max_size=20)


def columns(rows, dtype=torch.float64):
    """Tensors new (a leaf), old, advantages, and the rows of the tokens in order."""
    ordered = sorted(rows, key=lambda token: token[3])
    new, old, advantages, of_row = (list(column) for column in zip(*ordered, strict=True))
    made = [torch.tensor(column, dtype=dtype) for column in (new, old, advantages)]
    return made[0].requires_grad_(), made[1], made[2], torch.tensor(of_row)


def gradient_of(losses, leaf):
    return torch.autograd.grad(losses.sum(), leaf)[0]


def row_means(values, of_row):
    """(K,) mean over the row of each token."""
    totals = torch.zeros(4, dtype=values.dtype).index_add(0, of_row, values)
    return (totals / torch.bincount(of_row, minlength=4).clamp(min=1))[of_row]


def near_a_kink(log_ratio):
    return any(abs(log_ratio - kink) < 1e-5 for kink in KINKS)


def clipped(ratio, advantage, dual=None):
    """Loss of one token and its derivative by the ratio."""
    objective, slope = min(
        (ratio * advantage, advantage),
        (min(max(ratio, 1 - LOW), 1 + HIGH) * advantage, advantage if 1 - LOW < ratio < 1 + HIGH else 0.0),
    )
    if dual is not None and advantage < 0 and dual * advantage > objective:
        objective, slope = dual * advantage, 0.0
    return -objective, -slope


@given(tokens, st.sampled_from([torch.float64, torch.float32]), st.sampled_from([None, DUAL]))
def test_clipped_losses_and_gradients_are_those_of_ppo_token_by_token(rows, dtype, dual):
    new, old, advantages, _ = columns(rows, dtype)
    result = clipped_losses(new - old, advantages, **CLIPS, dual_bound=dual)
    gradient = gradient_of(result.losses, new)
    for t, (n, o, a) in enumerate(zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True)):
        loss, slope = clipped(math.exp(n - o), a, dual)
        assert float(result.losses[t].detach()) == pytest.approx(loss, rel=1e-5, abs=1e-9)
        if not near_a_kink(n - o):
            assert float(gradient[t]) == pytest.approx(slope * math.exp(n - o), rel=1e-5, abs=1e-9)


@given(tokens)
def test_the_bounds_are_told_apart_and_are_where_no_gradient_flows(rows):
    new, old, advantages, _ = columns(rows)
    result = clipped_losses(new - old, advantages, **CLIPS, dual_bound=DUAL)
    gradient = gradient_of(result.losses, new)
    for t, (n, o, a) in enumerate(zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True)):
        ratio = math.exp(n - o)
        if near_a_kink(n - o) or abs(a) < 1e-6:
            continue
        assert bool(result.high[t]) == (a > 0 and ratio > 1 + HIGH)
        assert bool(result.low[t]) == (a < 0 and ratio < 1 - LOW)
        assert bool(result.dual[t]) == (a < 0 and ratio > DUAL)
        assert bool(result.high[t] | result.low[t] | result.dual[t]) == (float(gradient[t]) == 0.0)


@given(tokens, st.sampled_from([None, DUAL]))
def test_the_sequence_loss_and_its_gradient_are_those_of_gspo_row_by_row(rows, dual):
    new, old, advantages, of_row = columns(rows)
    means = row_means(new - old, of_row)
    result = clipped_losses(sequence_log_ratios(new - old, means), advantages, **CLIPS, dual_bound=dual)
    gradient = gradient_of(result.losses, new)
    tokens_of = defaultdict(list)
    for t, row in enumerate(of_row.tolist()):
        tokens_of[row].append(t)
    for positions in tokens_of.values():
        n = len(positions)
        mean = math.fsum(float(new[t].detach()) - float(old[t]) for t in positions) / n
        ratio = math.exp(mean)
        found = [clipped(ratio, float(advantages[t]), dual) for t in positions]
        for t, (loss, _) in zip(positions, found, strict=True):
            assert float(result.losses[t].detach()) == pytest.approx(loss, rel=1e-9, abs=1e-12)
        if not near_a_kink(mean):
            slopes = [slope * ratio for _, slope in found]  # each token by its own advantage, at the row's ratio
            assert gradient[positions].tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)


@given(tokens, st.sampled_from([None, DUAL]))
def test_with_one_advantage_a_row_the_gradient_is_that_of_gspos_sequence_form(rows, dual):
    """The sequence form differentiates the mean itself: each token gets a share of all tokens' slopes."""
    new, old, advantages, of_row = columns(rows)
    first = {row: t for t, row in reversed(list(enumerate(of_row.tolist())))}
    one = advantages[[first[row] for row in of_row.tolist()]]
    weights = 1.0 / torch.bincount(of_row)[of_row]
    means = row_means(new - old, of_row)
    gradients = [
        gradient_of(clipped_losses(ratios, one, **CLIPS, dual_bound=dual).losses * weights, new)
        for ratios in (sequence_log_ratios(new - old, means), means)
    ]
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12)


@given(tokens, st.sampled_from([LOW, 1.0, 5.0]))
def test_cispo_weighs_the_gradient_of_every_token_by_its_clipped_ratio(rows, low):
    new, old, advantages, _ = columns(rows)
    result = truncated_policy_losses(new, new - old, advantages, eps_low=low, eps_high=HIGH)
    gradient = gradient_of(result.losses, new)
    for t, (n, o, a) in enumerate(zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True)):
        coefficient = min(max(math.exp(n - o), 1 - low), 1 + HIGH)
        assert float(result.losses[t].detach()) == pytest.approx(-coefficient * a * n, rel=1e-9, abs=1e-12)
        assert float(gradient[t]) == pytest.approx(-coefficient * a, rel=1e-9, abs=1e-12)
        if not near_a_kink(n - o):
            assert bool(result.low[t]) == (math.exp(n - o) < 1 - low)
            assert bool(result.high[t]) == (math.exp(n - o) > 1 + HIGH)


@pytest.mark.parametrize("gap", [500.0, -500.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ratio_beyond_the_range_of_floats_gives_finite_losses_and_gradients(gap, advantage, dtype):
    new = torch.tensor([-1.0 + gap], requires_grad=True, dtype=dtype)
    old, advantages = torch.tensor([-1.0], dtype=dtype), torch.tensor([advantage], dtype=dtype)
    for losses in (
        clipped_losses(new - old, advantages, **CLIPS).losses,
        truncated_policy_losses(new, new - old, advantages, **CLIPS).losses,
        *(kl_estimate(new, old, kind) for kind in ("k1", "k2", "k3", "low_var_kl")),
    ):
        assert losses.isfinite().all()
        assert gradient_of(losses, new).isfinite().all()


KL = {
    "k1": lambda d: (d, 1.0),
    "k2": lambda d: (d * d / 2, d),
    "k3": lambda d: (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
    "low_var_kl": lambda d: KL["k3"](d) if KL["k3"](d)[0] < 10 else (10.0, 0.0),
}


@pytest.mark.parametrize("kind", KL)
@given(st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0)), min_size=1, max_size=8))
def test_kl_estimates_and_their_gradients_equal_schulmans(kind, pairs):
    new = torch.tensor([n for n, _ in pairs], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([r for _, r in pairs], dtype=torch.float64)
    found = kl_estimate(new, ref, kind)
    expected = [KL[kind](n - r) for n, r in pairs]
    assert found.tolist() == pytest.approx([value for value, _ in expected], rel=1e-9, abs=1e-12)
    assert gradient_of(found, new).tolist() == pytest.approx([slope for _, slope in expected], rel=1e-9, abs=1e-12)


def test_kl_estimates_average_to_the_divergence_of_two_distributions():
    """k1 and k3 exactly, as an expectation over all tokens; k2's gradient is that of the divergence."""
    logits = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    p, q = logits.log_softmax(-1)
    divergence = float((p.exp() * (p - q)).sum())
    for kind in ("k1", "k3"):
        assert float((p.exp() * kl_estimate(p, q, kind)).sum()) == pytest.approx(divergence, rel=1e-12)
    free = logits[0].clone().requires_grad_()
    (exact,) = torch.autograd.grad((free.log_softmax(-1).exp() * (free.log_softmax(-1) - q)).sum(), free)
    (by_k2,) = torch.autograd.grad((p.exp() * kl_estimate(free.log_softmax(-1), q, "k2")).sum(), free)
    assert torch.allclose(by_k2, exact, rtol=1e-10, atol=1e-12)


def test_the_logged_divergence_to_the_old_policy_is_a_weighted_sum():
    weights = torch.tensor([0.5, 0.25], dtype=torch.float64)
    assert float(kl_sum(torch.tensor([0.2, -0.4], dtype=torch.float64), weights)) == pytest.approx(-0.1 + 0.1)


@given(st.lists(st.tuples(logprob, logprob), min_size=1, max_size=9), st.floats(0, 1), st.floats(1, 3))
def test_importance_weights_are_truncated_or_masked_and_carry_no_gradient(pairs, low, high):
    old = torch.tensor([o for o, _ in pairs], dtype=torch.float64, requires_grad=True)
    ratios = importance_ratios(old, torch.tensor([r for _, r in pairs], dtype=torch.float64))
    expected = [math.exp(o - r) for o, r in pairs]
    assert not ratios.requires_grad
    assert ratios.tolist() == pytest.approx(expected, rel=1e-12)
    assert truncated_weights(ratios, low=low, high=high).tolist() == pytest.approx(
        [min(max(ratio, low), high) for ratio in expected], rel=1e-12
    )
    for found, ratio in zip(masked_weights(ratios, low=low, high=high).tolist(), expected, strict=True):
        if min(abs(ratio - low), abs(ratio - high)) > 1e-9:
            assert found == pytest.approx(ratio if low <= ratio <= high else 0.0, rel=1e-12)


def test_the_bounds_of_importance_weights_are_within_them():
    ratios = torch.tensor([0.5, 2.0], dtype=torch.float64)
    for weights in (masked_weights, truncated_weights):
        assert weights(ratios, low=0.5, high=2.0).tolist() == [0.5, 2.0]


@given(tokens, st.floats(0, 1))
def test_a_row_is_left_out_where_it_is_bad_and_the_policy_has_left_it(rows, delta):
    new, old, advantages, of_row = columns(rows)
    kept = kept_by_sequence(row_means(old - new.detach(), of_row), advantages, delta=delta)
    for t, row in enumerate(of_row.tolist()):
        gaps = [float(old[u]) - float(new[u].detach()) for u in range(len(kept)) if of_row[u] == row]
        mean = math.fsum(gaps) / len(gaps)
        if abs(mean - delta) > 1e-9:
            assert bool(kept[t]) == (not (float(advantages[t]) < 0 and mean > delta))
