"""GRPO credit: the formula, its properties, and what is refused."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_trio.config.tree import ESTIMATORS, RewardConfig
from relax_trio.errors import CreditError
from relax_trio.reward.credit import assign_credit, grpo_credits, rloo_credits, session_credits
from relax_trio.testing.sample import make_sample

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

rewards_strategy = st.lists(st.floats(-1e6, 1e6, allow_nan=False, width=32), min_size=2, max_size=16)
normalize = st.booleans()


def group_of(*rewards):
    return [make_sample(place=place, reward=reward) for place, reward in enumerate(rewards)]


def test_a_group_by_hand():
    samples = group_of(1.0, 0.0, 0.0, 1.0)

    assign_credit(samples, RewardConfig())

    std = math.sqrt(4 * 0.25 / 3)
    expected = [0.5, -0.5, -0.5, 0.5]
    assert [sample.advantage for sample in samples] == pytest.approx([e / (std + 1e-6) for e in expected])


def test_without_std_normalization_credit_is_centred_only():
    samples = group_of(1.0, 0.0, 0.0, 0.0)

    assign_credit(samples, RewardConfig(grpo_std_normalization=False))

    assert [sample.advantage for sample in samples] == [0.75, -0.25, -0.25, -0.25]


@unhurried
@given(rewards_strategy)
def test_credit_equals_the_tensor_formula_of_other_trainers(rewards):
    tensor = torch.tensor(rewards, dtype=torch.float64)
    expected = (tensor - tensor.mean()) / (tensor.std() + 1e-6)

    if min(rewards) == max(rewards):
        assert grpo_credits(rewards) == [0.0] * len(rewards)
    else:
        assert grpo_credits(rewards) == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-7)


@unhurried
@given(rewards_strategy, normalize)
def test_credit_has_mean_zero(rewards, normalize_std):
    credit = grpo_credits(rewards, normalize_std=normalize_std)

    assert abs(math.fsum(credit)) <= 1e-9 * max(1.0, *map(abs, rewards)) * len(rewards)


@unhurried
@given(rewards_strategy, st.floats(0.01, 100), st.floats(-100, 100))
def test_credit_does_not_change_when_rewards_are_scaled_and_shifted(rewards, scale, shift):
    credit = grpo_credits(rewards)
    moved = grpo_credits([reward * scale + shift for reward in rewards])

    spread = max(rewards) - min(rewards)
    if spread * min(scale, 1.0) > 10:  # far above eps and the rounding of the shift
        assert moved == pytest.approx(credit, rel=1e-3, abs=1e-3)


@unhurried
@given(rewards_strategy, normalize, st.randoms(use_true_random=False))
def test_credit_follows_its_session_through_any_order(rewards, normalize_std, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    credit = grpo_credits(rewards, normalize_std=normalize_std)

    assert grpo_credits([rewards[i] for i in order], normalize_std=normalize_std) == [credit[i] for i in order]


@unhurried
@given(st.floats(-1e300, 1e300, allow_nan=False), st.integers(0, 16), normalize)
def test_equal_rewards_give_exactly_zero(reward, n, normalize_std):
    assert grpo_credits([reward] * n, normalize_std=normalize_std) == [0.0] * n


@unhurried
@given(rewards_strategy)
def test_a_better_reward_never_gets_less_credit(rewards):
    pairs = sorted(zip(rewards, grpo_credits(rewards), strict=True))

    assert all(a[1] <= b[1] for a, b in pairwise(pairs))


def test_reward_objects_are_credited_by_their_key():
    samples = group_of({"score": 1.0, "fmt": 0.0}, {"score": 0.0, "fmt": 9.0})

    assign_credit(samples, RewardConfig(reward_key="score", grpo_std_normalization=False))

    assert [sample.advantage for sample in samples] == [0.5, -0.5]


def test_several_contexts_of_a_session_are_refused_by_its_name():
    samples = [
        make_sample(group=2, place=0, name="main", reward=1.0),
        make_sample(group=2, place=1, name="main", reward=1.0),
        make_sample(group=2, place=1, name="searcher"),
    ]

    with pytest.raises(CreditError, match=r"session G2/1 exported several contexts \(main, searcher\)"):
        assign_credit(samples, RewardConfig())
    assert [sample.advantage for sample in samples] == [None] * 3


def test_a_missing_reward_leaves_the_group_without_credit():
    samples = group_of(1.0, None)

    with pytest.raises(CreditError, match="session G0/1 has no reward"):
        assign_credit(samples, RewardConfig())
    assert samples[0].advantage is None


@pytest.mark.parametrize("normalize_std", [True, False])
def test_rewards_beyond_the_range_of_floats_are_an_error_and_no_nan(normalize_std):
    samples = group_of(1.7e308, -1.7e308, -1.7e308)

    with pytest.raises(CreditError, match="group G0: its rewards lie too far apart"):
        assign_credit(samples, RewardConfig(grpo_std_normalization=normalize_std))
    assert samples[0].advantage is None


@unhurried
@given(rewards_strategy)
def test_leave_one_out_credit_is_the_reward_less_the_mean_of_the_others(rewards):
    expected = []
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        expected.append(reward - math.fsum(others) / len(others))
    scale = max(1.0, *map(abs, rewards))
    assert rloo_credits(rewards) == pytest.approx(expected, rel=1e-9, abs=1e-9 * scale)


@pytest.mark.parametrize(
    ("estimator", "credit"),
    [
        ("grpo", [0.5 / math.sqrt(1 / 3), -0.5 / math.sqrt(1 / 3)] * 2),
        ("gspo", [0.5 / math.sqrt(1 / 3), -0.5 / math.sqrt(1 / 3)] * 2),
        ("cispo", [0.5 / math.sqrt(1 / 3), -0.5 / math.sqrt(1 / 3)] * 2),
        ("dr_grpo", [0.5, -0.5] * 2),
        ("reinforce_plus_plus_baseline", [0.5, -0.5] * 2),
        ("rloo", [2 / 3, -2 / 3] * 2),
        ("reinforce_plus_plus", [1.0, 0.0] * 2),
    ],
)
def test_each_estimator_gives_its_own_credit(estimator, credit):
    samples = group_of(1.0, 0.0, 1.0, 0.0)

    assign_credit(samples, RewardConfig(advantage_estimator=estimator))

    assert [sample.advantage for sample in samples] == pytest.approx(credit, rel=1e-5)
    centred = [0.5, -0.5] * 2
    if estimator in ("grpo", "gspo", "cispo"):
        assert session_credits([1.0, 0.0] * 2, estimator, normalize_std=False) == centred


@pytest.mark.parametrize("estimator", ESTIMATORS)
@unhurried
@given(st.floats(-1e3, 1e3), st.integers(1, 8))
def test_a_group_of_equal_rewards_or_of_one_teaches_nothing_but_by_reinforce_plus_plus(estimator, reward, n):
    expected = [reward] * n if estimator == "reinforce_plus_plus" else [0.0] * n
    assert session_credits([reward] * n, estimator) == expected
