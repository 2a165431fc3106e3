"""From the credit of a row, or of its turns, to the advantage of its tokens."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_trio.errors import TrainError
from relax_trio.testing.sample import make_sample
from relax_trio.train.advantage import token_advantages

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
