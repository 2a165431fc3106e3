"""Steps, Groups and the first-request barrier on the virtual clock."""

from __future__ import annotations

import os
import sys
import types
import zlib
from collections import Counter
from types import SimpleNamespace

import pytest
import trio
from builders_runtime import (
    LIMITS,
    Client,
    answer,
    make_request,
    make_tasks,
    one_turn_agent,
    open_shared,
    open_work,
    user,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_trio.agent.fake import AgentExit, FakeAgentLauncher
from relax_trio.backend.fake import FakeBackend
from relax_trio.config.tree import RewardConfig
from relax_trio.data.rows import RowStream
from relax_trio.errors import BackendUnavailable, CreditError, RunFailed
from relax_trio.ids import GroupId
from relax_trio.reward.reward import RewardScorer
from relax_trio.runtime.evaluate import EvalDataset, Evaluation
from relax_trio.runtime.group import Dropped, Group
from relax_trio.runtime.leases import LeaseDesk
from relax_trio.sync.cpu import InlineCpuPool

SOAK = int(os.environ.get("SOAK", "1"))
"""How many times the usual number of examples a property gets; `tools/nightly` raises it."""


def names(events, *wanted):
    return [(e.name, e.fields.get("group", e.fields.get("place"))) for e in events if e.name in wanted]


async def test_a_step_yields_exactly_its_groups_in_order(autojump_clock, events):
    async with open_work() as work:
        result = await work.run_step(0)

    assert [group.id for group in result.groups] == ["G0", "G1"]
    assert [(s.place, s.row, s.index) for s in result.samples] == [
        ("G0/0", 0, 0),
        ("G0/1", 0, 1),
        ("G1/0", 1, 2),
        ("G1/1", 1, 3),
    ]
    assert all(s.advantage == 0.0 for s in result.samples)  # equal rewards
    assert result.seconds == 3.0
    assert Counter(name for name, _ in names(events, "group.leased", "group.scored")) == {
        "group.leased": 2,
        "group.scored": 2,
    }


async def test_no_session_generates_before_all_of_its_group_have_asked(autojump_clock):
    async def agent(agent):
        await trio.sleep(50 if agent.spec.place.endswith("/1") else 1)
        await one_turn_agent(agent)

    async with open_work(agent, rollout_batch_size=1) as work:
        await work.run_step(0)

    assert {call.at for call in work.shared.backend.calls if call.name == "generate"} == {50.0}


async def test_a_request_that_ends_before_the_lease_withdraws_its_place(autojump_clock):
    """Place 0 asks at 1 and leaves (grace over at 8); it asks again at 100: only then is the Group leased."""

    async def agent(agent):
        if agent.spec.place.endswith("/0"):
            await trio.sleep(1)
            call = agent.client.submit(agent, make_request(user("a")))
            await trio.sleep(2)
            call.detach()
            await trio.sleep(97)
        else:
            await trio.sleep(20)
        await one_turn_agent(agent)

    async with open_work(agent, rollout_batch_size=1) as work:
        await work.run_step(0)

    assert min(call.at for call in work.shared.backend.calls if call.name == "generate") == 100.0


async def test_a_failed_session_drops_its_group_and_the_row_comes_again(autojump_clock, events):
    fails = iter([True])

    async def agent(agent):
        await agent.client.chat(agent, user("a"))
        if agent.spec.place == "G0/0" and next(fails, False):
            agent.print("last words")
            raise AgentExit(7)
        await trio.sleep(5)
        agent.write_output({"reward": 1.0})

    async with open_work(agent) as work:
        result = await work.run_step(0)

    assert sorted(s.row for s in result.samples) == [0, 0, 1, 1]
    assert [group.id for group in result.groups] == ["G1", "G2"]
    assert (result.n_dropped, result.n_failed_sessions) == (1, 1)
    assert ("group.dropped", "G0") in names(events, "group.dropped")
    failed = next(e for e in events if e.name == "session.failed")
    assert "last words" in failed.fields["error"]
    assert work.shared.launcher.ended[1].place == "G0/1"  # the sibling was discarded


async def test_a_session_that_exits_before_its_first_request_fails_its_group(autojump_clock):
    async def agent(agent):
        if agent.spec.place == "G0/1":
            return
        await one_turn_agent(agent)

    async with open_work(agent) as work:
        result = await work.run_step(0)

    assert [group.id for group in result.groups] == ["G1", "G2"]


async def test_a_failure_outside_the_agent_is_tried_again_at_its_place(autojump_clock, events):
    backend = FakeBackend(lambda attempt: answer("ok"), tokens_per_s=1.0)
    backend.fail_next(BackendUnavailable("gone"))

    async with open_work(backend=backend) as work:
        result = await work.run_step(0)

    assert result.n_dropped == 0
    assert [e.fields["n_try"] for e in events if e.name == "session.retried"] == [1]
    assert len(result.samples) == 4


async def test_a_launch_that_keeps_failing_drops_the_group(autojump_clock):
    async with open_shared() as shared:
        launcher = FakeAgentLauncher(one_turn_agent, client=Client(shared.sessions), launch_errors=["no memory"] * 3)
        async with open_shared(launcher=launcher) as shared:
            group = Group(
                id=GroupId("G0"),
                number=0,
                task=make_tasks(1)[0],
                n_places=1,
                mode="train",
                limits=LIMITS,
                shared=shared,
                leases=LeaseDesk(wanted=1),
                session_retries=2,
            )
            outcome = await group.run()

    assert isinstance(outcome, Dropped)
    assert "no memory" in str(outcome.failure.error)


async def test_a_run_in_which_every_group_fails_stops_and_shows_the_log(autojump_clock):
    async def agent(agent):
        agent.print("ImportError: no module named nothing")
        raise AgentExit(1)

    async with open_work(agent) as work:
        with pytest.raises(RunFailed, match="no module named nothing"):
            await work.run_step(0)
        assert len(work.shared.launcher.started) <= 2 * (2 + 3 + 2)


async def test_a_row_that_fails_too_often_is_set_aside_and_named(autojump_clock, events):
    async def agent(agent):
        await agent.client.chat(agent, user("a"))
        if agent.session_input["metadata"]["row"] == 0:
            raise AgentExit(1)
        agent.write_output({"reward": 1.0})

    async with open_work(agent, n_samples_per_prompt=1, max_row_failures=3) as work:
        for step in range(3):
            result = await work.run_step(step)
            assert 0 not in {s.row for s in result.samples}

    assert [e.fields["source"] for e in events if e.name == "row.set_aside"] == ["rows.jsonl:1"]


async def test_resident_groups_are_bounded_by_the_concurrency(autojump_clock):
    live = []

    async def agent(agent):
        live.append(len(agent.client.live()))
        await one_turn_agent(agent)

    async with open_work(agent, rollout_batch_size=4, n_samples_per_prompt=1, agentic_concurrency=1) as work:
        launcher = work.shared.launcher
        launcher._client.live = lambda: launcher.live
        result = await work.run_step(0)

    assert set(live) == {1}
    assert result.seconds == 12.0


async def test_surplus_groups_of_an_oversampled_step_are_dropped_and_come_again(autojump_clock):
    async def agent(agent):
        await trio.sleep(10 * agent.session_input["metadata"]["row"])
        await one_turn_agent(agent)

    async with open_work(agent, n_samples_per_prompt=1, over_sampling_batch_size=4) as work:
        first = await work.run_step(0)
        second = await work.run_step(1)

    assert [s.row for s in first.samples] == [0, 1]
    assert first.n_dropped == 2
    assert [s.row for s in second.samples] == [2, 3]


async def test_no_reward_stops_the_step_and_names_the_place(autojump_clock):
    async def agent(agent):
        await agent.client.chat(agent, user("a"))

    async with open_work(agent) as work:
        with pytest.raises(CreditError, match=r"G0/0|G1/0"):
            await work.run_step(0)


async def test_cancelling_a_step_leaves_nothing(autojump_clock):
    async def agent(agent):
        await agent.client.chat(agent, user("a"))
        await trio.sleep_forever()

    with trio.move_on_after(7) as scope:
        async with open_work(agent) as work:
            await work.run_step(0)

    assert scope.cancelled_caught
    assert trio.current_time() == 7.0
    assert not work.shared.launcher.live
    assert work.shared.backend.load().n_running == 0
    assert work.residents.n_permits_used == 0


async def test_heartbeats_tell_of_an_open_step(autojump_clock, events):
    async def agent(agent):
        await agent.client.chat(agent, user("a"))
        await trio.sleep(150)
        agent.write_output({"reward": 1.0})

    async with open_work(agent) as work:
        await work.run_step(0)

    beats = [e.fields for e in events if e.name == "idle_heartbeat"]
    assert [(b["scored"], b["at_work"]) for b in beats] == [(0, 2), (0, 2)]


async def test_evaluation_rolls_out_singletons_within_its_concurrency(autojump_clock):
    async def agent(agent):
        assert agent.env["RELAX_ROLLOUT_MODE"] == "eval"
        await agent.client.chat(agent, user("a"))
        if agent.session_input["metadata"]["row"] == 1:
            raise AgentExit(1)
        agent.write_output({"reward": 1.0})

    async with open_shared(agent) as shared:
        scorer = RewardScorer(RewardConfig(), SimpleNamespace(), InlineCpuPool())
        dataset = EvalDataset(name="held", tasks=make_tasks(3), n_samples=2, concurrency=1)
        result = await Evaluation(dataset=dataset, shared=shared, limits=LIMITS, scorer=scorer).run()

    assert [s.row for s in result.samples] == [0, 0, 2, 2]
    assert result.n_failed == 2
    assert result.seconds == 9.0  # six Sessions of 3 s, two at a time


@settings(max_examples=25 * SOAK, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.random_module(),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sets(st.integers(0, 30), max_size=8),
    st.sets(st.integers(0, 5), max_size=1),
)
def test_rows_are_conserved_under_any_schedule(order, batch, concurrency, failing, doomed):
    """Whatever fails and however tasks interleave (`order` seeds Trio's scheduler), no row and no permit is lost.

    Groups with the numbers `failing` fail, and every Group of a row in `doomed`.
    """

    async def agent(agent):
        await trio.sleep(zlib.crc32(agent.spec.place.encode()) % 7)
        await agent.client.chat(agent, user("a"))
        if int(agent.spec.group[1:]) in failing or agent.session_input["metadata"]["row"] in doomed:
            raise AgentExit(1)
        agent.write_output({"reward": 1.0})

    async def main():
        fields = {"rollout_batch_size": batch, "n_samples_per_prompt": 2, "agentic_concurrency": concurrency}
        # So much work at once that the failures never count as a run in which everything fails.
        async with open_work(
            agent, n_rows=6, over_sampling_batch_size=batch + 19, max_row_failures=3, **fields
        ) as work:
            trained = Counter()
            for step in range(3):
                result = await work.run_step(step)
                assert len(result.groups) == batch
                trained += Counter(group.samples[0].row for group in result.groups)
            check_conserved(work.rows, trained)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def check_conserved(rows, trained):
    """Trained rows and those still to come up to the end of the epoch: each row as often as there were epochs.

    A row that was set aside came no more often than that, and doesn't come again.
    """
    n_epochs = rows.epoch + 1
    set_aside = {int(row.source.rpartition(":")[2]) - 1 for row in rows.set_aside_rows}
    kept = [row for row in range(len(rows.rows)) if row not in set_aside]
    assert all(trained[row] < n_epochs for row in set_aside)
    n_to_come = n_epochs * len(kept) - sum(trained[row] for row in kept)
    to_come = Counter(rows.take().row for _ in range(n_to_come))
    assert {row: trained[row] + to_come[row] for row in to_come | trained if row not in set_aside} == dict.fromkeys(
        kept, n_epochs
    )
    assert not set_aside & to_come.keys()


def test_the_check_of_conservation_finds_a_lost_a_doubled_and_an_invented_row():
    def stream():
        rows = RowStream(rows=make_tasks(4), seed=1, shuffle=False)
        taken = [rows.take() for _ in range(3)]
        rows.give_back(taken[1])
        return rows

    check_conserved(stream(), Counter([0, 2]))
    for wrong in ([0], [0, 1, 2], [0, 2, 2], [0, 3]):
        with pytest.raises(AssertionError):
            check_conserved(stream(), Counter(wrong))


async def test_a_dropped_group_is_told_why(autojump_clock, events):
    """G2 is at work, G3 in Reward when the step closes; both end at once and name the close."""

    class Scorer(RewardScorer):
        async def score(self, samples, *, evaluation=False):
            await trio.sleep(500 if samples[0].row == 3 else 0)

    scorer = Scorer(RewardConfig(), SimpleNamespace(), InlineCpuPool())

    async def agent(agent):
        await trio.sleep(100 if agent.session_input["metadata"]["row"] == 2 else 0)
        await one_turn_agent(agent)

    async with open_work(agent, n_samples_per_prompt=1, over_sampling_batch_size=4, reward=scorer) as work:
        await work.run_step(0)
        assert trio.current_time() == 3.0

    dropped = {e.fields["group"]: e.fields["reason"] for e in events if e.name == "group.dropped"}
    assert dropped == {"G2": "the step closed", "G3": "the step closed"}


def install_hooks(monkeypatch, **hooks):
    """A reward configuration whose hooks are the given functions, by flag."""
    module = types.ModuleType("work_hooks_under_test")
    for flag, fn in hooks.items():
        setattr(module, flag, fn)
    monkeypatch.setitem(sys.modules, "work_hooks_under_test", module)
    return {flag: f"work_hooks_under_test.{flag}" for flag in hooks}


async def test_a_filtered_group_creates_new_demand_and_its_row_is_done(autojump_clock, events, monkeypatch):
    """Rows 0 and 2 are filtered: the step trains on 1 and 3, and nothing comes back to the data."""
    paths = install_hooks(
        monkeypatch, dynamic_sampling_filter_path=lambda args, samples: samples[0].metadata["row"] % 2 == 1
    )
    scorer = RewardScorer(RewardConfig(**paths), SimpleNamespace(), InlineCpuPool())
    async with open_work(reward=scorer) as work:
        result = await work.run_step(0)

    assert sorted({s.row for s in result.samples}) == [1, 3]
    assert (result.n_dropped, result.n_filtered_groups, work.rows.n_given_back) == (2, 2, 0)
    assert {e.fields["group"] for e in events if e.name == "group.filtered"} == {"G0", "G2"}


async def test_groups_that_are_never_kept_are_told_of_at_intervals(autojump_clock, events, monkeypatch):
    """Two Groups at work: told after the 8th and the 16th in a row; a step in which one is kept begins anew."""
    paths = install_hooks(
        monkeypatch, dynamic_sampling_filter_path=lambda args, samples: samples[0].metadata["row"] in (17, 18, 25, 26)
    )
    scorer = RewardScorer(RewardConfig(**paths), SimpleNamespace(), InlineCpuPool())
    async with open_work(n_rows=40, reward=scorer) as work:
        await work.run_step(0)
        await work.run_step(1)

    told = [event.fields for event in events if event.name == "groups.none_kept"]
    assert [fields["groups"] for fields in told] == [8, 16]
    assert all("dynamic_sampling_filter_path" in fields["reason"] for fields in told)


async def test_with_a_group_hook_an_evaluation_rolls_a_row_out_as_one_group(autojump_clock, monkeypatch):
    async def agent(agent):
        await agent.client.chat(agent, user("a"))

    asked = []

    def rm(args, samples, *, evaluation=False):
        asked.append((evaluation, len(samples)))
        return [float(place) for place in range(len(samples))]

    paths = install_hooks(monkeypatch, custom_rm_path=rm)
    scorer = RewardScorer(RewardConfig(**paths, group_rm=True), SimpleNamespace(), InlineCpuPool())
    async with open_shared(agent) as shared:
        dataset = EvalDataset(name="held", tasks=make_tasks(3), n_samples=2, concurrency=1)
        result = await Evaluation(dataset=dataset, shared=shared, limits=LIMITS, scorer=scorer).run()

    assert asked == [(True, 2)] * 3
    assert [(s.place, s.row, s.reward) for s in result.samples] == [
        (f"E{row}/{place}", row, float(place)) for row in range(3) for place in range(2)
    ]
    assert result.seconds == 9.0, "E_d stays C_d * G_d Sessions"
