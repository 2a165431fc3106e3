"""Reward hooks on the virtual clock: time limits, concurrency, failure, cancellation."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest
import trio

from relax_trio.config.tree import RewardConfig
from relax_trio.errors import RewardError
from relax_trio.reward.reward import RewardScorer
from relax_trio.sync.cpu import InlineCpuPool
from relax_trio.testing.sample import make_sample


@pytest.fixture
def rm(monkeypatch):
    def install(fn, *, rm_timeout=600.0, max_calls=64):
        module = types.ModuleType("slow_rm_under_test")
        module.rm = fn
        monkeypatch.setitem(sys.modules, "slow_rm_under_test", module)
        config = RewardConfig(custom_rm_path="slow_rm_under_test.rm", rm_timeout=rm_timeout)
        return RewardScorer(config, SimpleNamespace(), InlineCpuPool(), max_calls=max_calls)

    return install


def rows(n):
    return [make_sample(place=place) for place in range(n)]


async def test_a_hook_that_does_not_answer_fails_at_its_limit_and_names_the_place(rm, autojump_clock, events):
    async def fn(args, sample):
        await trio.sleep(0 if sample.index == 0 else 1000)
        return 1.0

    with pytest.raises(RewardError, match=r"session G0/1: --custom-rm-path .* within 5 s; .*--rm-timeout"):
        await rm(fn, rm_timeout=5.0).score(rows(2))

    assert trio.current_time() == 5.0
    assert [event.name for event in events] == ["reward.scored", "reward.failed"]


async def test_an_answer_just_within_the_limit_counts(rm, autojump_clock):
    async def fn(args, sample):
        await trio.sleep(4.999)
        return 1.0

    samples = rows(1)
    await rm(fn, rm_timeout=5.0).score(samples)

    assert samples[0].reward == 1.0


async def test_calls_run_together_up_to_the_limit_and_waiting_costs_no_time_budget(rm, autojump_clock):
    running, most = 0, 0

    async def fn(args, sample):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(3)
        running -= 1
        return 1.0

    samples = rows(8)
    await rm(fn, rm_timeout=4.0, max_calls=2).score(samples)

    assert most == 2
    assert trio.current_time() == 12.0
    assert all(sample.reward == 1.0 for sample in samples)


async def test_the_limit_on_calls_is_shared_by_the_groups_of_a_run(rm, autojump_clock):
    async def fn(args, sample):
        await trio.sleep(1)
        return 1.0

    scorer = rm(fn, max_calls=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scorer.score, rows(2))
        nursery.start_soon(scorer.score, rows(2))

    assert trio.current_time() == 4.0


async def test_the_first_failure_cancels_the_other_calls_and_comes_out_bare(rm, autojump_clock):
    cancelled = []

    async def fn(args, sample):
        if sample.index == 1:
            await trio.sleep(2)
            raise ValueError("the judge is gone")
        try:
            await trio.sleep(100)
        except trio.Cancelled:
            cancelled.append(sample.index)
            raise

    with pytest.raises(RewardError, match=r"session G0/1.*the judge is gone"):
        await rm(fn).score(rows(3))

    assert trio.current_time() == 2.0
    assert sorted(cancelled) == [0, 2]


async def test_cancelling_the_score_cancels_the_hooks_and_frees_their_permits(rm, autojump_clock):
    async def fn(args, sample):
        await trio.sleep(10)
        return 1.0

    scorer = rm(fn, max_calls=1)
    samples = rows(3)
    with trio.move_on_after(1):
        await scorer.score(samples)
    assert [sample.reward for sample in samples] == [None] * 3

    await scorer.score(samples[:1])

    assert trio.current_time() == 11.0
    assert samples[0].reward == 1.0
