"""From the credit of a row, or of its turns, to the advantage of its tokens; shaped returns and whitening."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_trio.errors import TrainError
from relax_trio.testing.sample import make_sample
from relax_trio.train.advantage import Moments, return_kl, token_advantages, whitened

turn_lens = st.lists(st.integers(0, 4), min_size=1, max_size=5)
numbers = st.floats(-5, 5, allow_nan=False)


def sample_with(credit, **fields):
    sample = make_sample(**fields)
    sample.advantage = credit
    return sample


@given(turn_lens, numbers)
def test_one_credit_is_every_trained_tokens_advantage(lens, credit):
    sample = sample_with(credit, turn_lens=lens)
    assert list(token_advantages(sample)) == [credit * trained for trained in sample.loss_mask]


@given(turn_lens, st.data())
def test_credits_of_turns_are_those_of_their_tokens_and_observations_get_none(lens, data):
    credit = tuple(data.draw(numbers) for _ in lens)
    sample = sample_with(credit, turn_lens=lens)
    expected = []
    for turn, length in enumerate(lens):
        expected += [0.0] * bool(turn) + [credit[turn]] * length
    assert list(token_advantages(sample)) == expected


def test_a_turn_that_is_trained_elsewhere_shifts_no_credit():
    """`--dedup-shared-turns` masks the first turn: the second keeps its own credit."""
    sample = sample_with((1.0, 2.0), turn_lens=(2, 3))
    sample.loss_mask[:2] = bytes(2)
    assert list(token_advantages(sample)) == [0.0, 0.0, 0.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("credit", "told"),
    [
        (None, "without credit"),
        (math.nan, "finite"),
        ((1.0, math.inf), "finite"),
        ((1.0,), "1 credits for 2 assistant turns"),
    ],
)
def test_what_is_no_credit_is_refused_with_its_session(credit, told):
    with pytest.raises(TrainError, match=rf"session G0/0: .*{told}"):
        token_advantages(sample_with(credit, turn_lens=(2, 3)))


columns = st.lists(st.floats(-5, 5, allow_nan=False), min_size=1, max_size=30)


@given(st.lists(columns, min_size=1, max_size=5))
def test_moments_of_parts_join_into_those_of_the_whole(parts):
    joined = Moments()
    for part in parts:
        joined.join(Moments.of(torch.tensor(part, dtype=torch.float64)))
    whole = torch.tensor([value for part in parts for value in part], dtype=torch.float64)
    assert joined.n == len(whole)
    assert (joined.low, joined.high) == (float(whole.min()), float(whole.max()))
    assert joined.mean == pytest.approx(float(whole.mean()), abs=1e-12)
    if len(whole) > 1:
        assert joined.variance == pytest.approx(float(whole.var()), rel=1e-9, abs=1e-12)


@given(
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=9), min_size=1, max_size=4), st.integers(-(2**40), 2**40)
)
def test_the_deviation_of_large_numbers_that_are_nearly_alike_is_theirs(parts, offset):
    near, far = Moments(), Moments()
    for part in parts:
        numbers_of_part = torch.tensor(part, dtype=torch.float64) / 8
        near.join(Moments.of(numbers_of_part))
        far.join(Moments.of(numbers_of_part + offset))
    assert far.variance == pytest.approx(near.variance, rel=1e-2, abs=1e-6)


@given(st.lists(columns, min_size=2, max_size=5))
def test_whitening_gives_mean_0_and_variance_1_over_all_parts(parts):
    tensors = [torch.tensor(part, dtype=torch.float64) for part in parts]
    moments = Moments.of(torch.cat(tensors))
    white = torch.cat([whitened(tensor, moments) for tensor in tensors])
    if moments.variance > 1e-3:  # far above what is added to it
        assert float(white.mean()) == pytest.approx(0, abs=1e-9)
        assert float(white.var()) == pytest.approx(1, rel=1e-4)
        order = torch.cat(tensors).argsort(stable=True)
        assert (white[order].diff() >= 0).all()


@given(numbers, st.integers(1, 9))
def test_equal_advantages_are_whitened_to_exactly_zero(value, n):
    advantages = torch.full((n,), value, dtype=torch.float64)
    assert not whitened(advantages, Moments.of(advantages)).any()


@given(st.lists(st.tuples(numbers, columns), min_size=1, max_size=4), st.floats(0, 1))
def test_the_kl_of_the_tokens_still_to_come_is_taken_from_the_return(rows, beta):
    kl = [torch.tensor(column, dtype=torch.float64) for _, column in rows]
    taken = return_kl(kl, range(len(rows)), "reinforce_plus_plus")
    for (credit, column), found in zip(rows, taken, strict=True):
        reward = [-beta * k for k in column]
        reward[-1] += credit  # the outcome is the reward of the last token
        expected = [math.fsum(reward[t:]) for t in range(len(column))]
        assert (credit - beta * found).tolist() == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 2), columns), min_size=1, max_size=6))
def test_a_session_pays_for_its_contexts_as_for_one_that_holds_them_all(rows):
    """Behind a context's tokens come those of the contexts exported after it, whatever lies between them."""
    sessions = [session for session, _ in rows]
    kl = [torch.tensor(column, dtype=torch.float64) for _, column in rows]
    found = return_kl(kl, sessions, "reinforce_plus_plus")
    for session in set(sessions):
        whole = torch.cat([part for part, own in zip(kl, sessions, strict=True) if own == session])
        (expected,) = return_kl([whole], [0], "reinforce_plus_plus")
        parts = torch.cat([part for part, own in zip(found, sessions, strict=True) if own == session])
        assert torch.allclose(parts, expected, rtol=0, atol=1e-12)


def test_with_a_baseline_each_token_pays_for_its_own_kl():
    kl = [torch.tensor([0.5, -0.25]), torch.tensor([2.0])]
    assert [part.tolist() for part in return_kl(kl, [0, 0], "reinforce_plus_plus_baseline")] == [[0.5, -0.25], [2.0]]
