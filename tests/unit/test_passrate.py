"""pass@k counts Sessions, whatever they exported."""

from __future__ import annotations

import itertools

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from relax_trio.errors import CreditError
from relax_trio.observe.passrate import pass_rates
from relax_trio.testing.sample import make_sample


def rates(samples, **kwargs):
    return pass_rates(samples, **{"reward_key": None, "by_row": False, **kwargs})


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_it_is_the_share_of_draws_of_k_sessions_in_which_one_passes(passed):
    samples = [make_sample(place=place, reward=float(value)) for place, value in enumerate(passed)]

    found = rates(samples)

    for k in (1, 2, 4, 8):
        if k <= len(passed):
            draws = list(itertools.combinations(passed, k))
            assert found[f"pass@{k}"] == pytest.approx(sum(map(any, draws)) / len(draws))
        else:
            assert f"pass@{k}" not in found


def test_questions_count_alike_and_the_smallest_bounds_k():
    samples = [make_sample(group=0, place=place, reward=1.0) for place in range(4)]
    samples += [make_sample(group=1, place=place, reward=0.0) for place in range(2)]
    assert rates(samples) == {"pass_missing": 0, "pass@1": 0.5, "pass@2": 0.5}


def test_in_evaluation_sessions_of_one_row_answer_one_question():
    samples = [make_sample(group=number, reward=float(number == 0)) for number in range(2)]
    same_row = [evolve(sample, row=0) for sample in samples]
    assert rates(samples, by_row=True) == {"pass_missing": 0, "pass@1": 0.5}
    assert rates(same_row, by_row=True) == {"pass_missing": 0, "pass@1": 0.5, "pass@2": 1.0}


def test_one_context_stands_for_its_session_none_is_missing_two_are_an_error():
    main, searcher = make_sample(name="main", reward=1.0), make_sample(name="searcher")
    assert rates([main, searcher]) == {"pass_missing": 0, "pass@1": 1.0}
    assert rates([searcher]) == {"pass_missing": 1}
    with pytest.raises(CreditError, match="session G0/0: 2 of its contexts"):
        rates([main, make_sample(name="searcher", reward=0.0)])


def test_only_a_primary_reward_of_one_passes():
    samples = [make_sample(place=0, reward={"score": 1, "speed": 3}), make_sample(place=1, reward={"score": 0.5})]
    assert rates(samples, reward_key="score") == {"pass_missing": 0, "pass@1": 0.5, "pass@2": 1.0}
