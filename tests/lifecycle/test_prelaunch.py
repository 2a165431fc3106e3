"""Prelaunch on the virtual clock: who is started ahead, who is leased when, what a close leaves."""

from __future__ import annotations

import trio
from builders_runtime import LIMITS, make_tasks, one_turn_agent, open_work, user

from relax_trio.agent.fake import AgentExit
from relax_trio.reward.reward import RewardScorer
from relax_trio.runtime.evaluate import EvalDataset, Evaluation


def at(events, name, key="group"):
    """What `name` was emitted for, in order."""
    return [event.fields[key] for event in events if event.name == name]


def open_prelaunching(agent=one_turn_agent, **fields):
    """Two Groups of one Session a step; an agent takes 3 s of generation."""
    return open_work(
        agent, **{"n_samples_per_prompt": 1, "agentic_prelaunch": True, "agentic_concurrency": 4, **fields}
    )


async def test_free_permits_are_filled_with_groups_of_the_next_step_whose_requests_wait(autojump_clock, events):
    async with open_prelaunching() as work:
        work.n_steps = 2
        await work.run_step(0)
        assert [resident.group.id for resident in work.residents.unleased] == ["G2", "G3"]
        assert at(events, "group.started") == ["G0", "G1", "G2", "G3"]
        assert work.residents.desk.n_ready == 2
        await trio.sleep(500)  # the optimizer works
        assert at(events, "group.leased") == ["G0", "G1"]
        result = await work.run_step(1)

    assert [group.id for group in result.groups] == ["G2", "G3"]
    assert result.seconds == 3.0
    assert {call.at for call in work.shared.backend.calls if call.name == "generate"} == {0.0, 503.0}
    assert at(events, "group.started") == ["G0", "G1", "G2", "G3"], "nothing is prepared past the last step"


async def test_without_prelaunch_nothing_is_started_between_steps(autojump_clock, events):
    async with open_prelaunching(agentic_prelaunch=False) as work:
        await work.run_step(0)
        await trio.sleep(500)

    assert at(events, "group.started") == ["G0", "G1"]


async def test_the_permits_bound_what_is_prepared(autojump_clock, events):
    """One permit more than the step needs: one Group is prepared at 0, the other when a permit comes back at 3."""
    async with open_prelaunching(agentic_concurrency=3) as work, trio.open_nursery() as nursery:
        nursery.start_soon(work.run_step, 0)
        await trio.sleep(2.9)
        assert at(events, "group.started") == ["G0", "G1", "G2"]
        assert work.residents.n_permits_used == 3
        await trio.sleep(0.2)
        assert at(events, "group.started") == ["G0", "G1", "G2", "G3"]
        assert work.residents.n_permits_used == 2


async def test_a_ready_group_serves_the_current_step_first(autojump_clock, events):
    """G0 fails at 13; G2, prepared since 0, is leased in the same moment, and G4 is prepared in its place."""

    async def agent(agent):
        await agent.client.chat(agent, user("a"))
        if agent.spec.place == "G0/0":
            await trio.sleep(10)
            raise AgentExit(1)
        await trio.sleep(20)
        agent.write_output({"reward": 1.0})

    async with open_prelaunching(agent) as work:
        result = await work.run_step(0)
        assert [resident.group.id for resident in work.residents.unleased] == ["G3", "G4"]

    assert [group.id for group in result.groups] == ["G1", "G2"]
    assert result.seconds == 13.0 + 3.0 + 20.0
    assert at(events, "group.leased") == ["G0", "G1", "G2"]
    generated = sorted(call.at for call in work.shared.backend.calls if call.name == "generate")
    assert generated == [0.0, 0.0, 13.0]


async def test_a_close_drops_only_leased_groups(autojump_clock, events):
    """With oversampling one leased Group is unfinished at the close; the prepared ones stay."""

    async def agent(agent):
        await agent.client.chat(agent, user("a"))
        await trio.sleep(0 if agent.session_input["metadata"]["row"] < 2 else 1000)
        agent.write_output({"reward": 1.0})

    async with open_prelaunching(agent, over_sampling_batch_size=3, agentic_concurrency=5) as work:
        await work.run_step(0)
        assert at(events, "group.dropped") == ["G2"]
        assert [resident.group.id for resident in work.residents.unleased] == ["G3", "G4", "G5"]
        assert work.rows.n_given_back == 1


async def test_prepared_groups_stay_through_an_evaluation(autojump_clock, events):
    async with open_prelaunching() as work:
        await work.run_step(0)
        dataset = EvalDataset(name="held", tasks=make_tasks(2), n_samples=1, concurrency=2)
        scorer: RewardScorer = work.scorer
        result = await Evaluation(dataset=dataset, shared=work.shared, limits=LIMITS, scorer=scorer).run()
        assert len(result.samples) == 2
        assert work.residents.desk.n_ready == 2
        assert at(events, "group.dropped") == []


async def test_holding_in_prepare_costs_no_active_time(autojump_clock):
    """1000 s of holding, then 3 s of generation: a budget of 5 s is enough for it, one of 2 s is not."""

    async def agent(agent):
        await agent.client.chat(agent, user("a"))
        agent.write_output({"reward": 1.0})

    async with open_prelaunching(agent, shared_fields={"agent_timeout_s": 5.0}) as work:
        await work.run_step(0)
        await trio.sleep(1000)
        result = await work.run_step(1)
        assert [group.id for group in result.groups] == ["G2", "G3"]


async def test_a_group_that_fails_while_it_is_prepared_is_replaced_and_counted_in_the_next_step(autojump_clock, events):
    async def agent(agent):
        if agent.spec.place == "G2/0":
            raise AgentExit(3)
        await one_turn_agent(agent)

    async with open_prelaunching(agent) as work:
        first = await work.run_step(0)
        await trio.sleep(10)
        assert [resident.group.id for resident in work.residents.unleased] == ["G3", "G4"]
        second = await work.run_step(1)

    assert first.n_failed_sessions + second.n_failed_sessions == 1
    assert [group.id for group in second.groups] == ["G3", "G4"]
