"""Scoring: who gets asked for a reward, and what happens when there is none."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest

from relax_trio.config.tree import RewardConfig
from relax_trio.errors import ConfigError, CreditError, RewardError
from relax_trio.reward.reward import RewardScorer
from relax_trio.sync.cpu import InlineCpuPool
from relax_trio.testing.sample import make_sample


@pytest.fixture
def rm(monkeypatch):
    """Install a function as the hook module; gives a scorer that uses it."""

    def install(fn, args=None, **config):
        module = types.ModuleType("rm_under_test")
        module.rm = fn
        monkeypatch.setitem(sys.modules, "rm_under_test", module)
        config = RewardConfig(custom_rm_path="rm_under_test.rm", **config)
        return RewardScorer(config, args or SimpleNamespace(), InlineCpuPool())

    return install


def scorer(**config):
    return RewardScorer(RewardConfig(**config), SimpleNamespace(), InlineCpuPool())


async def test_an_exported_reward_stands_and_the_hook_is_asked_only_where_there_is_none(rm):
    asked = []

    async def fn(args, sample):
        asked.append((sample.index, args.lr))
        return 0.5

    samples = [make_sample(place=0, reward=1.0), make_sample(place=1), make_sample(place=2, reward=0.0)]
    await rm(fn, SimpleNamespace(lr=0.1)).score(samples)

    assert [sample.reward for sample in samples] == [1.0, 0.5, 0.0]
    assert asked == [(1, 0.1)]


async def test_neither_reward_nor_hook_names_the_place_and_what_to_configure():
    with pytest.raises(CreditError, match=r"session G4/1 has no reward.*--custom-rm-path"):
        await scorer().score([make_sample(group=4, reward=1.0), make_sample(group=4, place=1)])


async def test_a_session_is_rewarded_when_one_of_its_contexts_is():
    samples = [make_sample(name="main", reward=1.0), make_sample(name="searcher")]

    await scorer().score(samples)

    assert [sample.reward for sample in samples] == [1.0, None]


async def test_nothing_to_score_is_fine():
    await scorer().score([])


@pytest.mark.parametrize("value", [None, True, float("nan"), "1", {}])
async def test_what_a_hook_returns_is_checked(rm, value, events):
    with pytest.raises(RewardError, match=r"session G0/0: what rm_under_test\.rm returned"):
        await rm(lambda args, sample: value).score([make_sample()])

    assert [event.name for event in events] == ["reward.failed"]


async def test_an_exported_reward_is_checked():
    with pytest.raises(RewardError, match="session G0/0: its exported reward is True"):
        await scorer().score([make_sample(reward=True)])


async def test_a_reward_object_needs_its_key_even_when_the_hook_gave_it(rm):
    with pytest.raises(CreditError, match=r"G0/0.*--reward-key"):
        await rm(lambda args, sample: {"score": 1.0}).score([make_sample()])

    sample = make_sample()
    await rm(lambda args, sample: {"score": 1.0}, reward_key="score").score([sample])

    assert sample.reward == {"score": 1.0}


async def test_a_hook_that_takes_it_is_told_whether_it_is_evaluation(rm):
    told = []

    def fn(args, sample, **kwargs):
        told.append(kwargs)
        return 1.0

    await rm(fn).score([make_sample()])
    await rm(fn).score([make_sample()], evaluation=True)

    assert told == [{"evaluation": False}, {"evaluation": True}]


async def test_a_hook_changes_neither_rows_nor_the_arguments_of_others(rm):
    def fn(args, sample):
        sample.tokens.clear()
        sample.response_length = 0
        sample.metadata["judged"] = True
        return 1.0

    sample, args = make_sample(), SimpleNamespace(lr=0.1)
    await rm(fn, args).score([sample])

    assert len(sample.tokens) == 7
    assert sample.response_length == 4
    assert sample.metadata == {"judged": True}


def test_a_hook_that_cannot_be_loaded_is_a_config_error_before_anything_starts():
    with pytest.raises(ConfigError, match="--custom-rm-path"):
        scorer(custom_rm_path="no_such_module_here.rm")
