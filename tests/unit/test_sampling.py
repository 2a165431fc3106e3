"""Drawing tokens: the distribution, its logprobs, and randomness that depends on seed and position only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.backend.embedded.sampling import Draw, sample, sampling_log_probs, uniforms


def make_draw(n, *, temperature=1.0, top_p=1.0, top_k=-1, seed=0, position=0):
    def row(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (n,)).copy()

    return Draw(
        temperature=row(temperature, np.float32),
        top_p=row(top_p, np.float32),
        top_k=row(top_k, np.int64),
        seed=row(seed, np.uint64),
        position=row(position, np.int64),
    )


def logits_of(probs):
    return torch.log(torch.tensor([probs], dtype=torch.float32))


def test_uniforms_depend_on_seed_and_position_only():
    seeds = np.array([5, 5, 6, 5], np.uint64)
    positions = np.array([1, 2, 1, 1], np.int64)
    drawn = uniforms(seeds, positions)
    assert drawn[0] == drawn[3]
    assert len({*drawn.tolist()}) == 3
    assert uniforms(seeds[:1], positions[:1])[0] == drawn[0]


def test_uniforms_fill_the_unit_interval_evenly():
    drawn = uniforms(np.arange(20_000, dtype=np.uint64) % np.uint64(40), np.arange(20_000, dtype=np.int64) // 40)
    counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
    assert drawn.max() < 1.0
    assert abs(counts - 1000).max() < 150
    neighbours = np.corrcoef(drawn[:-1], drawn[1:])[0, 1]
    assert abs(neighbours) < 0.03


def test_tokens_are_drawn_as_often_as_they_are_likely():
    probs = [0.5, 0.25, 0.0, 0.15, 0.1]
    n = 20_000
    ids, log_probs = sample(logits_of(probs).expand(n, -1), make_draw(n, seed=3, position=np.arange(n)))
    shares = np.bincount(ids.numpy(), minlength=5) / n
    assert abs(shares - probs).max() < 0.015
    assert shares[2] == 0
    assert torch.allclose(log_probs, torch.log(torch.tensor(probs))[ids], atol=1e-6)


def test_greedy_takes_the_likeliest_with_its_plain_logprob():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, 4.0]])
    ids, log_probs = sample(logits, make_draw(2, temperature=0.0, top_p=0.5, top_k=1))
    assert ids.tolist() == [1, 2]
    expected = torch.log_softmax(logits, -1).gather(1, ids[:, None]).squeeze(1)
    assert torch.equal(log_probs, expected)


def test_temperature_scales_before_the_softmax():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert torch.allclose(
        sampling_log_probs(logits, make_draw(1, temperature=0.5)), torch.log_softmax(logits / 0.5, -1), atol=1e-6
    )


def test_top_k_keeps_the_likeliest_and_renormalizes():
    probs = sampling_log_probs(logits_of([0.1, 0.4, 0.2, 0.3]), make_draw(1, top_k=2)).exp()[0]
    assert probs.tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=1e-6)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    probs = sampling_log_probs(logits_of([0.1, 0.4, 0.2, 0.3]), make_draw(1, top_p=0.69)).exp()[0]
    assert probs.tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=1e-6)
    probs = sampling_log_probs(logits_of([0.1, 0.4, 0.2, 0.3]), make_draw(1, top_p=0.71)).exp()[0]
    assert probs.tolist() == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], abs=1e-6)


def test_top_p_near_zero_keeps_one_token():
    ids, log_probs = sample(logits_of([0.1, 0.4, 0.2, 0.3]), make_draw(1, top_p=1e-6))
    assert ids.tolist() == [1]
    assert log_probs.tolist() == [0.0]


def test_rows_do_not_disturb_each_other():
    torch.manual_seed(1)
    logits = torch.randn(4, 50)
    mixed = Draw(
        temperature=np.array([1.0, 0.0, 0.7, 1.0], np.float32),
        top_p=np.array([1.0, 1.0, 0.8, 1.0], np.float32),
        top_k=np.array([-1, -1, 9, 5], np.int64),
        seed=np.arange(4, dtype=np.uint64),
        position=np.arange(4, dtype=np.int64) + 10,
    )
    together, log_probs = sample(logits, mixed)
    for i in range(4):
        alone, log_prob = sample(
            logits[i : i + 1],
            Draw(
                temperature=mixed.temperature[i : i + 1],
                top_p=mixed.top_p[i : i + 1],
                top_k=mixed.top_k[i : i + 1],
                seed=mixed.seed[i : i + 1],
                position=mixed.position[i : i + 1],
            ),
        )
        assert alone.item() == together[i].item()
        assert log_prob.item() == pytest.approx(log_probs[i].item(), abs=1e-6)


def test_logits_that_are_not_finite_give_a_logprob_that_is_not_finite():
    logits = torch.tensor([[1.0, float("nan"), 2.0], [1.0, 2.0, 3.0]])
    ids, log_probs = sample(logits, make_draw(2))
    assert ((ids >= 0) & (ids < 3)).all()
    assert log_probs.isfinite().tolist() == [False, True]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(-1, 40),
    spread=st.floats(0.1, 30.0),
)
def test_a_drawn_token_is_always_possible(seed, position, temperature, top_p, top_k, spread):
    generator = torch.Generator().manual_seed(position)
    logits = torch.randn(3, 32, generator=generator) * spread
    draw = make_draw(3, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, position=position)
    ids, log_probs = sample(logits, draw)
    possible = sampling_log_probs(logits, draw)
    assert log_probs.isfinite().all()
    assert torch.equal(possible.gather(1, ids[:, None]).squeeze(1), log_probs)
    assert torch.allclose(possible.exp().sum(-1), torch.ones(3), atol=1e-5)
