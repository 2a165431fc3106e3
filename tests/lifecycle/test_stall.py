"""Long waits are told with the chain of their owners; the task tree names what a user knows."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
import trio
from builders_runtime import LIMITS, answer, make_tasks, open_work, user

from relax_trio.backend.fake import FakeBackend
from relax_trio.config.tree import RewardConfig
from relax_trio.errors import RewardError
from relax_trio.reward.reward import RewardScorer
from relax_trio.runtime.evaluate import EvalDataset, Evaluation
from relax_trio.runtime.overlap import Overlap
from relax_trio.sync.cpu import InlineCpuPool
from relax_trio.sync.debug import dump_on_signal, render_tree


def stalls(events):
    return [(e.fields["chain"], e.fields["waits_for"], e.fields["seconds"]) for e in events if e.name == "wait.stalled"]


def text_of(attempt):
    return bytes(t - 1 for t in attempt.token_ids if t)


def slow(seconds):
    return FakeBackend(lambda attempt: answer("x" * (seconds - 1)), tokens_per_s=1.0)


async def test_a_long_attempt_is_told_down_to_its_rid(autojump_clock, events):
    async with open_work(rollout_batch_size=1, n_samples_per_prompt=1, backend=slow(63)) as work:
        await work.run_step(0)

    assert stalls(events) == [("step 0 > G0 (leased) > G0/0-0 > r1 > G0/0-0.r1.1", "backend", 60)]


async def test_an_agent_that_asks_nothing_is_told(autojump_clock, events):
    async def agent(agent):
        await trio.sleep(70)
        await agent.client.chat(agent, user("a"))
        await trio.sleep(130)
        agent.write_output({"reward": 1.0})

    async with open_work(agent, rollout_batch_size=1, n_samples_per_prompt=1) as work:
        await work.run_step(0)

    assert stalls(events) == [
        ("step 0 > G0 (in Prepare) > G0/0-0", "its agent's first model call", 60),
        ("step 0 > G0 (leased) > G0/0-0", "its agent's next model call", 180 - 73),
    ]


async def test_a_request_that_waits_for_its_siblings_is_told(autojump_clock, events):
    async def agent(agent):
        if agent.spec.place.endswith("/1"):
            await trio.sleep(100)
        await agent.client.chat(agent, user("a"))
        agent.write_output({"reward": 1.0})

    async with open_work(agent, rollout_batch_size=1) as work:
        await work.run_step(0)

    assert ("step 0 > G0 (in Prepare) > G0/0-0 > r1", "the lease of its Group", 60) in stalls(events)


async def test_a_slow_reward_is_told_and_keeps_nothing_open_that_is_paid(autojump_clock, events):
    class Scorer(RewardScorer):
        async def score(self, samples, *, evaluation=False):
            await trio.sleep(0 if samples[0].row else 200)

    scorer = Scorer(RewardConfig(), SimpleNamespace(), InlineCpuPool())
    async with open_work(
        rollout_batch_size=1, n_samples_per_prompt=1, over_sampling_batch_size=2, reward=scorer
    ) as work:
        result = await work.run_step(0)

    assert [group.id for group in result.groups] == ["G1"]
    assert trio.current_time() == 3.0
    assert stalls(events) == []
    async with open_work(rollout_batch_size=1, n_samples_per_prompt=1, reward=scorer) as work:
        await work.run_step(0)
    assert stalls(events) == [("step 0 > G0 (leased)", "reward", 117), ("step 0 > G0 (leased)", "reward", 177)]


async def test_waits_of_an_evaluation_are_told(autojump_clock, events):
    async with open_work(backend=slow(63)) as work:
        dataset = EvalDataset(name="held", tasks=make_tasks(1), n_samples=1, concurrency=1)
        await Evaluation(dataset=dataset, shared=work.shared, limits=LIMITS, scorer=work.scorer).run()

    assert stalls(events) == [("eval held > E0 (leased) > E0/0-0 > r1 > E0/0-0.r1.1", "backend", 60)]


async def test_the_task_tree_names_groups_places_sessions_and_requests(autojump_clock):
    async with open_work(rollout_batch_size=1, n_samples_per_prompt=2) as work, trio.open_nursery() as nursery:
        nursery.start_soon(work.run_step, 0, name="step 0")
        await trio.sleep(1)
        tree = render_tree().splitlines()

    depth = {line.strip().split("  ")[0]: line for line in tree}
    assert {"prepare", "group G0", "place G0/0", "place G0/1", "request G0/0-0.r1", "step 0"} <= set(depth)
    assert "backend/fake.py" in depth["request G0/0-0.r1"]

    def indent(name):
        return len(depth[name]) - len(depth[name].lstrip())

    assert indent("group G0") < indent("place G0/0") < indent("request G0/0-0.r1")


async def test_a_signal_tells_the_tree():
    told, done = [], trio.Event()

    def tell(text):
        told.append(text)
        done.set()

    async with trio.open_nursery() as nursery:
        await nursery.start(dump_on_signal, tell, name="dumps")
        os.kill(os.getpid(), signal.SIGUSR1)
        with trio.fail_after(5):
            await done.wait()
        nursery.cancel_scope.cancel()
    assert "dumps" in told[0]


async def test_rewards_of_an_evaluation_are_told_and_their_failure_comes_out_bare(autojump_clock, events):
    class Scorer(RewardScorer):
        async def score(self, samples, *, evaluation=False):
            await trio.sleep(100)
            raise RewardError("no judge")

    async with open_work() as work:
        dataset = EvalDataset(name="held", tasks=make_tasks(1), n_samples=1, concurrency=1)
        scorer = Scorer(RewardConfig(), SimpleNamespace(), InlineCpuPool())
        with pytest.raises(RewardError, match="no judge"):
            await Evaluation(dataset=dataset, shared=work.shared, limits=LIMITS, scorer=scorer, heartbeat_s=50.0).run()

    assert stalls(events) == [("eval held", "its rewards", 97)]


async def test_groups_that_are_at_work_between_windows_are_told(autojump_clock, events):
    """Fully async, two at work, one needed: step 0 has its Group at 3 and step 1 at 6, whose partition nobody takes.

    No window is open from then on, but G1 still runs."""
    backend = FakeBackend(lambda attempt: answer("x" * 62 if b"q1" in text_of(attempt) else "ok"), tokens_per_s=1.0)
    async with open_work(
        rollout_batch_size=1, n_samples_per_prompt=1, over_sampling_batch_size=2, fully_async=True, backend=backend
    ) as work:
        with trio.move_on_after(100):
            await Overlap(work=work).run(0, 3)

    assert [(e.name, e.fields["rollout"]) for e in events if e.name == "accounting_end"] == [
        ("accounting_end", 0),
        ("accounting_end", 1),
    ]
    chain = "between steps > G1 (leased) > G1/0-0 > r1 > G1/0-0.r1.1"
    assert stalls(events) == [(chain, "backend", 60)]
