"""Verdicts on complete Groups: Group rewards, filters, custom advantage."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from relax_trio.config.tree import RewardConfig
from relax_trio.errors import ConfigError, CreditError, RewardError
from relax_trio.reward.filters import Keep, check_reward_nonzero_std
from relax_trio.reward.judge import judge_group
from relax_trio.reward.reward import RewardScorer
from relax_trio.reward.view import HookSample
from relax_trio.sync.cpu import InlineCpuPool
from relax_trio.testing.sample import make_sample


@pytest.fixture
def make_scorer(monkeypatch):
    """A scorer whose hooks are the given functions."""

    def make(*, rm=None, keep=None, advantage=None, dynamic=True, **config):
        module = types.ModuleType("hooks_under_test")
        named = {"custom_rm_path": rm, "dynamic_sampling_filter_path": keep, "agentic_custom_advantage_path": advantage}
        for flag, fn in named.items():
            setattr(module, flag, fn)
        monkeypatch.setitem(sys.modules, "hooks_under_test", module)
        paths = {flag: f"hooks_under_test.{flag}" for flag, fn in named.items() if fn is not None}
        args = SimpleNamespace(reward_key=config.get("reward_key"), lr=0.5, use_dynamic_batch_size=dynamic)
        return RewardScorer(RewardConfig(**paths, **config), args, InlineCpuPool())

    return make


def group(*rewards, **fields):
    return [make_sample(place=place, reward=reward, **fields) for place, reward in enumerate(rewards)]


async def judge(samples, scorer, *, assigns_credit=True):
    return await judge_group(samples, scorer, assigns_credit=assigns_credit)


# --- Group rewards ---------------------------------------------------------------------------------------------------


async def test_a_group_hook_gets_all_rows_at_once_and_exported_rewards_stand(make_scorer):
    asked = []

    async def rm(args, samples):
        asked.append([sample.index for sample in samples])
        return [0.25] * len(samples)

    samples = group(None, 1.0, None)
    assert await judge(samples, make_scorer(rm=rm, group_rm=True)) is None

    assert asked == [[0, 1, 2]]
    assert [sample.reward for sample in samples] == [0.25, 1.0, 0.25]


async def test_a_group_hook_is_not_asked_where_every_session_has_a_reward(make_scorer):
    async def rm(args, samples):
        raise AssertionError("not needed")

    assert await judge(group(1.0, 0.0), make_scorer(rm=rm, group_rm=True)) is None


@pytest.mark.parametrize("value", [[1.0], 1.0, None, [1.0, 2.0, 3.0]])
async def test_a_group_hook_that_returns_other_than_one_reward_a_row_is_named(make_scorer, value):
    def rm(args, samples):
        return value

    with pytest.raises(RewardError, match=r"group G0: hooks_under_test.* for 2 rows"):
        await judge(group(None, None), make_scorer(rm=rm, group_rm=True))


async def test_a_group_hook_that_leaves_a_session_without_reward_is_an_error(make_scorer):
    def rm(args, samples):
        return [1.0, None]

    with pytest.raises(CreditError, match="session G0/1 has no reward"):
        await judge(group(None, None), make_scorer(rm=rm, group_rm=True))


async def test_a_failing_group_hook_is_named_with_its_group(make_scorer):
    def rm(args, samples):
        raise ValueError("no judge today")

    with pytest.raises(RewardError, match=r"group G0: --custom-rm-path .* raised ValueError: no judge today"):
        await judge(group(None), make_scorer(rm=rm, group_rm=True))


# --- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verdict",
    [
        False,
        np.bool_(False),
        Keep(keep=False, reason="dull"),
        SimpleNamespace(keep=torch.tensor(False), reason=None),
    ],
)
async def test_a_filter_gives_a_group_up_with_its_reason(make_scorer, events, verdict):
    async def keep(args, samples):
        assert args.lr == 0.5
        return verdict

    reason = await judge(group(1.0, 0.0), make_scorer(keep=keep))

    assert reason.startswith("filtered by hooks_under_test.")
    assert ("dull" in reason) == (getattr(verdict, "reason", None) == "dull")
    assert [event.name for event in events] == ["group.filtered"]


@pytest.mark.parametrize(
    "verdict",
    [
        True,
        Keep(keep=True),
        np.bool_(True),
        torch.tensor([1.0, 2.0]).std() > 0,
        SimpleNamespace(keep=np.std([1, 2]) > 0),
    ],
)
async def test_a_kept_group_gets_its_credit(make_scorer, verdict):
    samples = group(1.0, 0.0)
    assert await judge(samples, make_scorer(keep=lambda args, samples: verdict)) is None
    assert samples[0].advantage == -samples[1].advantage != 0


@pytest.mark.parametrize("verdict", [None, 1, "yes", SimpleNamespace(keep=1), np.float64(1), np.array([True])])
async def test_a_verdict_that_is_none_is_an_error(make_scorer, verdict):
    with pytest.raises(RewardError, match="group G0: --dynamic-sampling-filter-path"):
        await judge(group(1.0), make_scorer(keep=lambda args, samples: verdict))


def test_the_built_in_filter_keeps_groups_whose_sessions_differ():
    def verdict(*samples, reward_key=None):
        return check_reward_nonzero_std(SimpleNamespace(reward_key=reward_key), [HookSample(s) for s in samples])

    assert verdict(*group(1.0, 0.0)).keep
    assert verdict(*group(1.0, 1)) == Keep(keep=False, reason="all rewards are 1.0")
    assert verdict(*group({"s": 1, "t": 2}, {"s": 1, "t": 3}), reward_key="s").keep is False
    assert verdict(*group({"s": 1}, {"s": 2}), reward_key="s").keep


async def test_rollout_without_training_filters_nothing(make_scorer):
    scorer = make_scorer(keep=lambda args, samples: False, advantage=lambda metadata_by_slot: None)
    assert await judge(group(1.0), scorer, assigns_credit=False) is None


# --- custom advantage ------------------------------------------------------------------------------------------------


def contexts():
    """Two Sessions with a main context of two turns and a searcher of one."""
    return [
        make_sample(place=place, name=name, metadata={"of": [place, name]}, turn_lens=turns, reward=None)
        for place in range(2)
        for name, turns in (("main", (2, 3)), ("searcher", (4,)))
    ]


async def test_it_gets_exported_metadata_by_session_and_name_and_gives_each_context_its_credit(make_scorer):
    seen = []

    def advantage(metadata_by_slot):
        seen.extend(metadata_by_slot)
        return [{"searcher": 0.5, "main": 1}, {"main": [0.25, -1.0], "searcher": 0.0}]

    samples = contexts()
    assert await judge(samples, make_scorer(advantage=advantage)) is None

    assert seen == [{"main": {"of": [place, "main"]}, "searcher": {"of": [place, "searcher"]}} for place in range(2)]
    assert [sample.advantage for sample in samples] == [1.0, 0.5, (0.25, -1.0), 0.0]


async def test_an_implicit_export_goes_by_none(make_scorer):
    samples = group(None, None)
    await judge(samples, make_scorer(advantage=lambda metadata_by_slot: [{None: 1.0}, {None: -1.0}]))
    assert [sample.advantage for sample in samples] == [1.0, -1.0]


async def test_none_gives_the_whole_group_up(make_scorer, events):
    reason = await judge(contexts(), make_scorer(advantage=lambda metadata_by_slot: None))
    assert reason == "given up by hooks_under_test.agentic_custom_advantage_path (None)"
    assert [event.name for event in events] == ["group.filtered"]


GOOD = {"main": 1.0, "searcher": 1.0}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({}, "group G0: .* must return None, or a list with one mapping"),
        ([GOOD], "group G0: .* returned a list of 1"),
        ([GOOD, 3], "session G0/1: .* returned int 3"),
        ([GOOD, {"main": 1.0}], "session G0/1: .* leaves out 'searcher'"),
        ([GOOD, {**GOOD, "other": 1.0, None: 2}], r"session G0/1: .* names 'other', \(implicit\)"),
        ([GOOD, {**GOOD, "main": float("nan")}], "session G0/1, context 'main': .* finite"),
        ([GOOD, {**GOOD, "main": True}], "context 'main': .* gave True"),
        ([GOOD, {**GOOD, "main": "1"}], "context 'main': .* gave '1'"),
        ([GOOD, {**GOOD, "main": [1.0]}], "context 'main': .* 1 numbers for 2 assistant turns"),
        ([GOOD, {**GOOD, "main": [1.0, float("inf")]}], "gave inf for turn 1"),
        ([GOOD, {**GOOD, "searcher": []}], "context 'searcher': .* 0 numbers for 1 assistant turns"),
    ],
)
async def test_what_is_no_credit_names_group_session_and_context_and_changes_no_row(make_scorer, value, told):
    samples = contexts()
    with pytest.raises(CreditError, match=told):
        await judge(samples, make_scorer(advantage=lambda metadata_by_slot: value))
    assert [sample.advantage for sample in samples] == [None] * 4


async def test_a_failing_advantage_is_a_credit_error_with_the_hooks_own_frames(make_scorer):
    def advantage(metadata_by_slot):
        return metadata_by_slot[0]["nobody"]

    with pytest.raises(CreditError, match=r"(?s)group G0: --agentic-custom-advantage-path .*KeyError.*nobody"):
        await judge(contexts(), make_scorer(advantage=advantage))


async def test_with_custom_advantage_no_reward_is_needed_and_the_single_hook_is_not_asked(make_scorer):
    def rm(args, sample):
        raise AssertionError("skipped")

    scorer = make_scorer(rm=rm, advantage=lambda metadata_by_slot: [GOOD, GOOD])
    assert await judge(contexts(), scorer) is None


async def test_with_custom_advantage_a_group_hook_still_reports_rewards(make_scorer):
    samples = contexts()

    def rm(args, samples):
        return [1.0 if sample.metadata["of"][1] == "main" else None for sample in samples]

    await judge(samples, make_scorer(rm=rm, group_rm=True, advantage=lambda metadata_by_slot: [GOOD, GOOD]))
    assert [sample.reward for sample in samples] == [1.0, None, 1.0, None]


def test_hooks_are_checked_when_the_run_starts(make_scorer):
    with pytest.raises(ConfigError, match=r"--agentic-custom-advantage-path .*must be callable as"):
        make_scorer(advantage=lambda: None)
    with pytest.raises(ConfigError, match="--dynamic-sampling-filter-path"):
        make_scorer(keep=lambda args: True)


async def test_several_contexts_need_dynamic_batch_sizes_and_one_context_does_not(make_scorer):
    asked = []

    def advantage(metadata_by_slot):
        asked.append(metadata_by_slot)
        return [{None: 1.0}, {None: -1.0}]

    scorer = make_scorer(advantage=advantage, dynamic=False)
    with pytest.raises(CreditError, match=r"session G0/\d exported several contexts \(main, .*--max-tokens-per-gpu N"):
        await judge(contexts(), scorer)
    assert asked == []
    samples = group(None, None)
    assert await judge(samples, scorer) is None
    assert [sample.advantage for sample in samples] == [1.0, -1.0]
