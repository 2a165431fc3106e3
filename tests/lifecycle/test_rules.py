"""Rules of docs/lifecycle.md for a step by itself, as timetables: see tests/builders_rules.py."""

from __future__ import annotations

import trio
from builders_rules import HOOKS, timetable, without_reward
from scenarios import ask, model, row_of

from relax_trio.agent.fake import AgentExit
from relax_trio.backend.base import WeightSource
from relax_trio.config.tree import RewardConfig, RolloutConfig
from relax_trio.errors import BackendUnavailable
from relax_trio.runtime.evaluate import EvalDataset, Evaluation
from relax_trio.testing import LIMITS, make_request, make_rows, prompt_text, user

# --- capacity, barrier, lease, replenishment ---------------------------------------------------------------------


def test_prepare_and_runtime_share_permits_that_come_back_when_the_last_process_is_gone(schedule_seed):
    """Two permits for three Groups; agents take 1 s to start and 2 s to end, so G1's permit is free at 6, not at 4."""

    async def agent(agent):
        await ask(agent)
        await trio.sleep(7 if row_of(agent) == 0 else 0)

    async def main(bench):
        config = RolloutConfig(rollout_batch_size=3, n_samples_per_prompt=1, agentic_concurrency=2)
        async with bench.engine(agent, start_s=1.0, end_s=2.0), bench.open_work(config) as work:
            await work.run_step(0)

    assert timetable(main, schedule_seed) == {
        0.0: "open 0, started G0, started G1",
        1.0: "leased G0, leased G1, prepared G0, prepared G1, run G0/0-0.r1.1, run G1/0-0.r1.1",
        6.0: "scored G1, started G2",
        7.0: "leased G2, prepared G2, run G2/0-0.r1.1",
        12.0: "scored G2",
        13.0: "close 0, scored G0",
    }


def test_a_group_is_leased_when_every_place_has_a_live_request_at_once(schedule_seed):
    """Place 0 asks at 1 and is gone for good at 2, place 1 asks at 5: the next request of place 0, at 20, counts."""

    async def main(bench):
        async def agent(agent):
            if agent.spec.place == "G0/0":
                await trio.sleep(1)
                first = bench.client.send(agent, make_request(user("never mind")))
                await trio.sleep(1)
                first.hang_up(for_good=True)
                await trio.sleep(18)
            else:
                await trio.sleep(5)
            await ask(agent)

        config = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=2)
        async with bench.engine(agent), bench.open_work(config) as work:
            await work.run_step(0)

    assert timetable(main, schedule_seed) == {
        0.0: "open 0, started G0",
        20.0: "leased G0, prepared G0, run G0/0-0.r2.1, run G0/1-0.r1.1",
        23.0: "close 0, scored G0",
    }


def test_a_lease_once_given_stays(schedule_seed):
    """Leased at 5; place 0 loses its request at 6 and asks again at 30, without standing in line again."""

    async def main(bench):
        async def agent(agent):
            if agent.spec.place == "G0/0":
                first = bench.client.send(agent, make_request(user("q0")))
                await trio.sleep(6)
                first.hang_up(for_good=True)
                await trio.sleep(24)
            else:
                await trio.sleep(5)
            await ask(agent)

        config = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=2)
        async with bench.engine(agent), bench.open_work(config) as work:
            await work.run_step(0)

    assert timetable(main, schedule_seed) == {
        0.0: "open 0, started G0",
        5.0: "leased G0, prepared G0, run G0/0-0.r1.1, run G0/1-0.r1.1",
        30.0: "run G0/0-0.r2.1",
        33.0: "close 0, scored G0",
    }


def test_a_drop_is_replaced_at_once_and_the_close_drops_what_is_beyond_the_debt(schedule_seed):
    """Two Groups are needed, three at work; a row takes 3 + 10 N s. Row 0 fails at 3 and comes again at once, row 2 is
    dropped by the close at 13 and comes first in the next step: its Group ends at 13 + 23."""

    async def agent(agent):
        await ask(agent)
        await trio.sleep(10 * row_of(agent))
        if agent.spec.place == "G0/0":
            raise AgentExit(1)

    async def main(bench):
        config = RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=1, over_sampling_batch_size=3)
        async with bench.engine(agent), bench.open_work(config) as work:
            first, second = await work.run_step(0), await work.run_step(1)
            assert [group.task.row for group in first.groups] == [1, 0]
            assert [group.task.row for group in second.groups] == [2, 3]
            assert (work.rows.n_taken, work.rows.n_given_back) == (7, 3)

    assert timetable(main, schedule_seed) == {
        0.0: "leased G0, leased G1, leased G2, open 0, prepared G0, prepared G1, prepared G2, "
        "run G0/0-0.r1.1, run G1/0-0.r1.1, run G2/0-0.r1.1, started G0, started G1, started G2",
        3.0: "dropped G0, leased G3, prepared G3, run G3/0-0.r1.1, started G3",
        6.0: "scored G3",
        13.0: "close 0, dropped G2, leased G4, leased G5, leased G6, open 1, prepared G4, prepared G5, prepared G6, "
        "run G4/0-0.r1.1, run G5/0-0.r1.1, run G6/0-0.r1.1, scored G1, started G4, started G5, started G6",
        36.0: "scored G4",
        46.0: "close 1, dropped G6, scored G5",
    }


def test_places_try_again_after_the_engine_groups_after_the_agent_and_rows_until_they_are_set_aside(schedule_seed):
    """Both attempts at 2 fail, and their places try again at 3, each when its own process is gone, without a new lease.
    The agent of place 1 fails with row 0 every time: that drops G0 at 9 and G1 at 15, the second one for good."""
    backend = model()
    for _ in range(2):
        backend.fail_next(BackendUnavailable("flaky"))

    async def agent(agent):
        is_second = agent.spec.place.endswith("/1")
        await trio.sleep(2 if is_second else 0)
        await ask(agent)
        if row_of(agent) == 0 and is_second:
            raise AgentExit(1)

    async def main(bench):
        config = RolloutConfig(
            rollout_batch_size=1, n_samples_per_prompt=2, agentic_session_retries=1, max_row_failures=2
        )
        async with bench.engine(agent, backend=backend, end_s=1.0), bench.open_work(config) as work:
            result = await work.run_step(0)
            assert (result.n_dropped, result.n_failed_sessions, result.n_set_aside_rows) == (2, 4, 1)

    assert timetable(main, schedule_seed) == {
        0.0: "open 0, started G0",
        2.0: "leased G0, prepared G0, run G0/0-0.r1.1, run G0/1-0.r1.1",
        3.0: "retry G0/0, retry G0/1, run G0/0-1.r1.1",
        5.0: "run G0/1-1.r1.1",
        9.0: "dropped G0, started G1",
        11.0: "leased G1, prepared G1, run G1/0-0.r1.1, run G1/1-0.r1.1",
        15.0: "aside rows.jsonl:1, dropped G1, started G2",
        17.0: "leased G2, prepared G2, run G2/0-0.r1.1, run G2/1-0.r1.1",
        21.0: "close 0, scored G2",
    }


def test_a_row_that_only_the_engine_fails_on_is_not_tried_for_ever(schedule_seed):
    """Every attempt about row 0 fails. Each Group tries it twice; the second Group sets it aside, while row 1 pays."""

    async def main(bench):
        backend = model()
        generate = backend.generate

        async def fail_row_0(attempt):
            if "q0" in prompt_text(attempt.token_ids):
                backend.fail_next(BackendUnavailable("out of memory"))
            return await generate(attempt)

        backend.generate = fail_row_0
        config = RolloutConfig(
            rollout_batch_size=1, n_samples_per_prompt=1, agentic_session_retries=1, max_row_failures=2
        )
        async with bench.engine(ask, backend=backend), bench.open_work(config) as work:
            result = await work.run_step(0)
            assert [group.task.row for group in result.groups] == [1]
            assert [row.source for row in work.rows.set_aside_rows] == ["rows.jsonl:1"]

    assert timetable(main, schedule_seed) == {
        0.0: "aside rows.jsonl:1, dropped G0, dropped G1, leased G0, leased G1, leased G2, open 0, "
        "prepared G0, prepared G1, prepared G2, retry G0/0, retry G1/0, run G0/0-0.r1.1, "
        "run G0/0-1.r1.1, run G1/0-0.r1.1, run G1/0-1.r1.1, run G2/0-0.r1.1, started G0, started G1, "
        "started G2",
        3.0: "close 0, scored G2",
    }


def test_a_filtered_group_is_replaced_and_its_row_is_done(schedule_seed):
    async def main(bench):
        config = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=1)
        reward = RewardConfig(dynamic_sampling_filter_path=f"{HOOKS}.odd_rows")
        async with bench.engine(ask), bench.open_work(config, reward=reward) as work:
            await work.run_step(0)
            assert (work.rows.n_taken, work.rows.n_given_back) == (2, 0)

    assert timetable(main, schedule_seed) == {
        0.0: "leased G0, open 0, prepared G0, run G0/0-0.r1.1, started G0",
        3.0: "dropped G0, filtered G0, leased G1, prepared G1, run G1/0-0.r1.1, started G1",
        6.0: "close 0, scored G1",
    }


def test_a_reward_keeps_no_step_open_that_has_what_it_needs(schedule_seed):
    """G1 is in Reward from 3 on; the step has its Group and closes, and the reward is cancelled."""

    async def main(bench):
        config = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=1, over_sampling_batch_size=2)
        reward = RewardConfig(custom_rm_path=f"{HOOKS}.late_for_group_one")
        async with bench.engine(without_reward), bench.open_work(config, reward=reward) as work:
            await work.run_step(0)
            assert work.rows.n_given_back == 1

    assert timetable(main, schedule_seed) == {
        0.0: "leased G0, leased G1, open 0, prepared G0, prepared G1, run G0/0-0.r1.1, run G1/0-0.r1.1, "
        "started G0, started G1",
        3.0: "close 0, dropped G1, scored G0",
    }


# --- prelaunch ----------------------------------------------------------------------------------------------------


def test_prelaunch_warms_the_next_step_over_step_optimizer_and_evaluation_and_ends_with_the_last_step(schedule_seed):
    """Agents need 4 s to start. G1 is ready at 5, while step 0 runs, and its request waits over optimizer (8 to 10) and
    evaluation (10 to 18). G2 is started with step 1 and ready at 24, while the second evaluation runs; its hold of 8 s
    costs no active time. Nothing is started ahead of the last step's end."""

    async def agent(agent):
        await trio.sleep(row_of(agent))
        await ask(agent)

    async def main(bench):
        config = RolloutConfig(
            rollout_batch_size=1, n_samples_per_prompt=1, agentic_prelaunch=True, agentic_concurrency=2
        )
        async with bench.engine(agent, start_s=4.0, end_s=1.0) as shared, bench.open_work(config, n_steps=3) as work:
            for step in range(3):
                await work.run_step(step)
                await trio.sleep(2)
                await bench.backend.update_weights(str(step + 1), WeightSource(tensors={}))
                dataset = EvalDataset(name="held", tasks=make_rows(1), n_samples=1, concurrency=1)
                await Evaluation(dataset=dataset, shared=shared, limits=LIMITS, scorer=work.scorer).run()
            assert [session.budget.remaining_s for session in bench.sessions.seen if session.place == "G2/0"] == [1797]

    assert timetable(main, schedule_seed) == {
        0.0: "open 0, started G0, started G1",
        4.0: "leased G0, prepared G0, run G0/0-0.r1.1",
        5.0: "prepared G1",
        8.0: "close 0, scored G0",
        10.0: "eval held, weights 1",
        14.0: "leased E0, prepared E0, run E0/0-0.r1.1",
        18.0: "evaluated held, leased G1, open 1, run G1/0-0.r1.1, started G2",
        22.0: "close 1, scored G1",
        24.0: "eval held, prepared G2, weights 2",
        28.0: "leased E0, prepared E0, run E0/0-0.r1.1",
        32.0: "evaluated held, leased G2, open 2, run G2/0-0.r1.1",
        36.0: "close 2, scored G2",
        38.0: "eval held, weights 3",
        42.0: "leased E0, prepared E0, run E0/0-0.r1.1",
        46.0: "evaluated held",
    }


# --- evaluation ---------------------------------------------------------------------------------------------------


def test_datasets_are_evaluated_one_after_another_each_with_its_size_and_concurrency(schedule_seed):
    """Three rows once, two Groups at once; then two rows twice, one Group of two Sessions at once."""

    async def main(bench):
        config = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=1)
        async with bench.engine(ask) as shared, bench.open_work(config) as work:
            for name, n_rows, n_samples, concurrency in (("one", 3, 1, 2), ("two", 2, 2, 1)):
                dataset = EvalDataset(name=name, tasks=make_rows(n_rows), n_samples=n_samples, concurrency=concurrency)
                await Evaluation(dataset=dataset, shared=shared, limits=LIMITS, scorer=work.scorer).run()

    assert timetable(main, schedule_seed) == {
        0.0: "eval one, leased E0, leased E1, prepared E0, prepared E1, run E0/0-0.r1.1, run E1/0-0.r1.1",
        3.0: "leased E2, prepared E2, run E2/0-0.r1.1",
        6.0: "eval two, evaluated one, leased E0, leased E1, prepared E0, prepared E1, run E0/0-0.r1.1, "
        "run E1/0-0.r1.1",
        9.0: "leased E2, leased E3, prepared E2, prepared E3, run E2/0-0.r1.1, run E3/0-0.r1.1",
        12.0: "evaluated two",
    }
