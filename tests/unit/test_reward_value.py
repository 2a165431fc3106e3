"""What counts as a reward, and what a hook sees and may change."""

from __future__ import annotations

import math

import numpy as np
import pytest

from relax_trio.errors import CreditError, RewardError
from relax_trio.reward.value import checked_reward, numeric_fields, primary_reward
from relax_trio.reward.view import HookSample, take_over
from relax_trio.testing.sample import make_sample


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        ({"score": 1.0, "acc": True, "pred": "42", "parts": [1, None]}, None),
        ({"score": np.float64(0.1)}, {"score": 0.1}),
    ],
)
def test_numbers_and_objects_of_numbers_are_rewards(value, expected):
    reward = checked_reward(value, "it")

    assert reward == (value if expected is None else expected)
    assert type(reward) in (int, float, dict)


@pytest.mark.parametrize(
    "value",
    [
        True,
        np.bool_(True),
        None,
        "1.0",
        [1.0],
        math.nan,
        math.inf,
        10**400,
        -(10**400),
        1j,
        {},
        {"score": math.nan},
        {"score": -math.inf},
        {"score": {"deep": math.nan}},
        {1: 2.0},
        {"score": object()},
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_reward_is_refused_by_name(value):
    with pytest.raises(RewardError, match=r"^session G1/2: its reward "):
        checked_reward(value, "session G1/2: its reward")


def test_the_primary_reward_of_a_number_is_the_number_with_and_without_a_key():
    sample = make_sample(reward=2)

    assert primary_reward(sample, None) == primary_reward(sample, "score") == 2.0


def test_the_primary_reward_of_an_object_is_its_field():
    assert primary_reward(make_sample(reward={"score": 1, "fmt": 0.5}), "score") == 1.0


@pytest.mark.parametrize(
    ("reward", "key", "says"),
    [
        (None, None, "session G3/1 has no reward"),
        ({"score": 1.0, "fmt": 0.5}, None, r"--reward-key \(keys: fmt, score\)"),
        ({"score": 1.0, "fmt": 0.5}, "outcome", "no 'outcome'.*keys: fmt, score"),
        ({"score": True}, "score", "True"),
        ({"score": "high"}, "score", "'high'"),
    ],
)
def test_a_reward_object_without_its_key_names_place_and_keys(reward, key, says):
    with pytest.raises(CreditError, match=says) as caught:
        primary_reward(make_sample(group=3, place=1, reward=reward), key)

    assert "G3/1" in str(caught.value)


def test_flags_and_texts_are_no_numeric_fields():
    assert numeric_fields({"a": 1, "b": True, "c": "2", "d": 0.5, "e": None}) == {"a": 1.0, "d": 0.5}


def test_a_hook_sees_a_row_as_plain_lists_and_cannot_reach_ours():
    sample = make_sample(prompt=[{"role": "user", "content": "hi"}], turn_lens=(2, 1))
    view = HookSample(sample)

    assert view.tokens == [0, 1, 2, 3, 4, 5, 6]
    assert view.loss_mask == [1, 1, 0, 1]
    assert view.rollout_log_probs == [-0.5, -0.5, 0.0, -0.5]
    assert view.weight_versions == ["0"]
    assert (view.response, view.response_length, view.label, view.status) == ("2", 4, "2", "completed")
    view.tokens.clear()
    view.loss_mask[0] = 0
    view.prompt[0]["content"] = "changed"
    view.label = "changed"

    assert list(sample.tokens) == [0, 1, 2, 3, 4, 5, 6]
    assert sample.loss_mask[0] == 1
    assert sample.prompt == [{"role": "user", "content": "hi"}]
    assert sample.label == "2"


def test_what_a_hook_writes_into_metadata_is_taken_over_as_a_copy():
    sample = make_sample(metadata={"kept": {"deep": 1}})
    view = HookSample(sample)
    view.metadata["kept"]["deep"] = 2
    view.train_metadata["weight"] = [0.5]

    assert sample.metadata == {"kept": {"deep": 1}}
    take_over(view, sample, "pkg.rm")
    view.train_metadata["weight"].append(1)

    assert sample.metadata == {"kept": {"deep": 2}}
    assert sample.train_metadata == {"weight": [0.5]}


@pytest.mark.parametrize("bad", [{"x": object()}, {"x": math.nan}, {1: 2}, None, []], ids=repr)
def test_metadata_that_is_no_json_any_more_is_the_hooks_error(bad):
    sample = make_sample(metadata={"kept": 1})
    view = HookSample(sample)
    view.train_metadata["taken"] = 1
    view.metadata = bad

    with pytest.raises(RewardError, match=r"G0/0: pkg\.rm left sample\.metadata"):
        take_over(view, sample, "pkg.rm")
    assert sample.metadata == {"kept": 1}
    assert sample.train_metadata == {}
