"""Each rule of docs/lifecycle.md as a timetable: everything that happens to Groups and attempts, with exact times.

A timetable is the same under every schedule: what happens in one moment is sorted, so only times and ids count.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import trio
from scenarios import ask, model, row_of
from scenarios_loop import training

from relax_trio.agent.fake import AgentExit
from relax_trio.backend.base import WeightSource
from relax_trio.config.tree import Config, RewardConfig, RolloutConfig, TrainConfig
from relax_trio.errors import BackendUnavailable, CreditError
from relax_trio.events import event_sink
from relax_trio.runtime.evaluate import EvalDataset, Evaluation
from relax_trio.testing import LIMITS, Bench, make_request, make_rows, prompt_of, prompt_text, run_virtual, user
from relax_trio.train.fake import FakeTrainer

ABOUT = {
    "group.started": "group",
    "group.prepared": "group",
    "group.leased": "group",
    "group.scored": "group",
    "group.dropped": "group",
    "group.filtered": "group",
    "session.retried": "place",
    "row.set_aside": "source",
    "step.waiting": "protected",
    "step.credited": "debt",
    "partition.sealed": "surplus",
    "accounting_start": "rollout",
    "accounting_end": "rollout",
    "eval.started": "dataset",
    "eval.completed": "dataset",
}
"""Events of a timetable, by the field that names what they are about."""

TOLD = {name: name.rpartition(".")[2] for name in ABOUT} | {
    "accounting_start": "open",
    "accounting_end": "close",
    "eval.started": "eval",
    "eval.completed": "evaluated",
    "session.retried": "retry",
    "row.set_aside": "aside",
}
CALLED = {"generate": "run", "abort": "abort", "update_weights": "weights"}
"""How a timetable calls events, and calls of the backend."""


def timetable(main, seed):
    """Run `main(bench)` on the virtual clock; what happened as `{time: "what, …"}`, each moment sorted."""
    bench, moments = Bench(), {}

    def note(event):
        if event.name in TOLD:
            moments.setdefault(event.at, []).append(f"{TOLD[event.name]} {event.fields[ABOUT[event.name]]}")

    async def stamped(bench):
        with event_sink(note, trio.current_time):
            await main(bench)

    run_virtual(stamped, bench, seed=seed)
    for call in bench.backend.calls:
        if call.name != "close_session":
            moments.setdefault(call.at, []).append(f"{CALLED[call.name]} {call.what}")
    return {at: ", ".join(sorted(moments[at])) for at in sorted(moments)}


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


async def odd_rows(args, samples):
    """A dynamic filter."""
    return SimpleNamespace(keep=samples[0].metadata["row"] % 2 == 1, reason="even")


async def late_for_group_one(args, sample):
    """A reward hook that takes 30 s for G1."""
    await trio.sleep(30 if sample.group_index == 1 else 0)
    return 1.0


async def without_reward(agent):
    """One turn, whose reward the hook gives."""
    await agent.client.chat(agent, prompt_of(agent))


def test_a_filtered_group_is_replaced_and_its_row_is_done(schedule_seed):
    async def main(bench):
        config = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=1)
        reward = RewardConfig(dynamic_sampling_filter_path=f"{__name__}.odd_rows")
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
        reward = RewardConfig(custom_rm_path=f"{__name__}.late_for_group_one")
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


# --- partial rollout ----------------------------------------------------------------------------------------------


def test_a_turn_is_parked_and_resumed_until_its_session_is_protected_and_then_waited_for(schedule_seed):
    """One Group is needed, two at work; row 1 takes 21 s, 10 s pass between steps and bring new weights. Aborted at 3
    and at 16, G1 is protected from 26 on: step 2 has its Group at 29 and waits for G1 until 41; G1 pays step 3."""
    spans, attempts = [], []

    async def main(bench):
        config = RolloutConfig(
            rollout_batch_size=1,
            n_samples_per_prompt=1,
            partial_rollout=True,
            over_sampling_batch_size=2,
            partial_rollout_max_aborted_count=2,
        )
        async with bench.engine(ask, backend=model({1: "x" * 20})), bench.open_work(config, n_steps=5) as work:
            for step in range(4):
                result = await work.run_step(step)
                spans.append([(s.place, [(v.version, v.n_tokens) for v in s.weight_versions]) for s in result.samples])
                await trio.sleep(10)
                await bench.backend.update_weights(str(step + 1), WeightSource(tensors={}))
        attempts.extend(
            (a.rid, len(a.token_ids) - a.response_start, a.sampling.max_new_tokens)
            for a in bench.backend.attempts
            if a.rid.startswith("G1/")
        )

    assert timetable(main, schedule_seed) == {
        0.0: "leased G0, leased G1, open 0, prepared G0, prepared G1, run G0/0-0.r1.1, run G1/0-0.r1.1, "
        "started G0, started G1",
        3.0: "abort G1/0-0.r1.1, close 0, scored G0",
        13.0: "leased G2, open 1, prepared G2, run G1/0-0.r1.2, run G2/0-0.r1.1, started G2, weights 1",
        16.0: "abort G1/0-0.r1.2, close 1, scored G2",
        26.0: "leased G3, open 2, prepared G3, run G1/0-0.r1.3, run G3/0-0.r1.1, started G3, weights 2",
        29.0: "scored G3, waiting G1",
        41.0: "close 2, scored G1",
        51.0: "close 3, open 3, weights 3",
        61.0: "weights 4",
    }
    assert attempts == [("G1/0-0.r1.1", 0, 64), ("G1/0-0.r1.2", 3, 61), ("G1/0-0.r1.3", 6, 58)]
    assert spans == [
        [("G0/0", [("0", 3)])],
        [("G2/0", [("1", 3)])],
        [("G3/0", [("2", 3)])],
        [("G1/0", [("0", 3), ("1", 3), ("2", 15)])],
    ]


def test_active_time_runs_from_the_lease_stops_in_pauses_and_goes_on_for_the_protected(schedule_seed):
    """12 s of active time. G1 is leased at 10, spends 3 s to the pause at 13, none up to 113, 3 s to the second pause
    at 116; protected from 216 on, it spends the last 6 s while step 2 waits, and fails at 222."""

    async def main(bench):
        config = RolloutConfig(
            rollout_batch_size=1,
            n_samples_per_prompt=1,
            partial_rollout=True,
            over_sampling_batch_size=2,
            partial_rollout_max_aborted_count=2,
            agentic_prelaunch=True,
        )
        engine = bench.engine(ask, backend=model({1: "x" * 40}), agent_timeout_s=12.0)
        async with engine, bench.open_work(config, n_steps=4) as work:
            work.plan(0)
            work.residents.update()  # prepared, as behind a step before it
            await trio.sleep(10)
            for step in range(3):
                result = await work.run_step(step)
                await trio.sleep(100)
            assert (result.n_failed_sessions, result.n_dropped) == (1, 1)

    assert timetable(main, schedule_seed) == {
        0.0: "prepared G0, prepared G1, started G0, started G1",
        10.0: "leased G0, leased G1, open 0, run G0/0-0.r1.1, run G1/0-0.r1.1",
        13.0: "abort G1/0-0.r1.1, close 0, prepared G2, scored G0, started G2",
        113.0: "leased G2, open 1, run G1/0-0.r1.2, run G2/0-0.r1.1",
        116.0: "abort G1/0-0.r1.2, close 1, prepared G3, scored G2, started G3",
        216.0: "leased G3, open 2, run G1/0-0.r1.3, run G3/0-0.r1.1",
        219.0: "prepared G4, scored G3, started G4, waiting G1",
        222.0: "close 2, dropped G1, prepared G5, started G5",
        322.0: "dropped G4, dropped G5",
    }


def test_a_dynamic_close_takes_the_surplus_that_is_complete_at_the_pause_by_whole_multiples(schedule_seed):
    """Two rows a Group, four Groups at work, one needed: three are complete at 3. A second one makes four rows; the
    third one pays step 1, which so closes as it opens."""

    async def main(bench):
        config = RolloutConfig(
            rollout_batch_size=1,
            n_samples_per_prompt=2,
            partial_rollout=True,
            over_sampling_batch_size=4,
            use_dynamic_global_batch_size=True,
        )
        engine = bench.engine(ask, backend=model({3: "x" * 20}))
        async with engine, bench.open_work(config, n_steps=2, data_parallel_size=4) as work:
            first = await work.run_step(0)
            assert len(first.samples) == 4
            assert len(work.ledger.surplus) == 1
            second = await work.run_step(1)
            assert len(second.samples) == 2

    assert timetable(main, schedule_seed) == {
        0.0: "leased G0, leased G1, leased G2, leased G3, open 0, prepared G0, prepared G1, prepared G2, "
        "prepared G3, run G0/0-0.r1.1, run G0/1-0.r1.1, run G1/0-0.r1.1, run G1/1-0.r1.1, "
        "run G2/0-0.r1.1, run G2/1-0.r1.1, run G3/0-0.r1.1, run G3/1-0.r1.1, started G0, started G1, "
        "started G2, started G3",
        3.0: "abort G3/0-0.r1.1, abort G3/1-0.r1.1, close 0, close 1, dropped G3, open 1, scored G0, "
        "scored G1, scored G2, sealed 0, sealed 1",
    }


def test_a_reward_outlives_the_close_of_a_step_that_retains_its_group(schedule_seed):
    """G1 is in Reward from 3 to 33. It keeps step 0 open for no moment, is in nobody's way, and pays step 1."""

    async def main(bench):
        config = RolloutConfig(
            rollout_batch_size=1, n_samples_per_prompt=1, partial_rollout=True, over_sampling_batch_size=2
        )
        reward = RewardConfig(custom_rm_path=f"{__name__}.late_for_group_one")
        async with bench.engine(without_reward), bench.open_work(config, reward=reward) as work:
            for step in range(2):
                await work.run_step(step)
                assert work.residents.n_permits_used == 0
                await trio.sleep(40)

    assert timetable(main, schedule_seed) == {
        0.0: "leased G0, leased G1, open 0, prepared G0, prepared G1, run G0/0-0.r1.1, run G1/0-0.r1.1, "
        "started G0, started G1",
        3.0: "close 0, scored G0",
        33.0: "scored G1",
        43.0: "close 1, open 1",
    }


def test_a_close_that_waits_for_a_protected_group_ends_with_the_run(schedule_seed):
    """Protected from 3 on, G1 keeps the close of step 1 waiting from 6 on; G3 can't be given credit at 10, so that
    nothing will be trained any more, and the step ends at once."""

    async def agent(agent):
        await agent.client.chat(agent, prompt_of(agent))
        if row_of(agent) == 3:
            await trio.sleep(4)
        else:
            agent.write_output({"reward": 1.0})

    async def main(bench):
        config = RolloutConfig(
            rollout_batch_size=1,
            n_samples_per_prompt=1,
            partial_rollout=True,
            over_sampling_batch_size=3,
            partial_rollout_max_aborted_count=1,
        )
        engine = bench.engine(agent, backend=model({1: "x" * 40, 2: "x" * 4}))
        async with engine, bench.open_work(config) as work:
            await work.run_step(0)
            with pytest.raises(CreditError, match="G3/0"):
                await work.run_step(1)

    assert timetable(main, schedule_seed) == {
        0.0: "leased G0, leased G1, leased G2, open 0, prepared G0, prepared G1, prepared G2, "
        "run G0/0-0.r1.1, run G1/0-0.r1.1, run G2/0-0.r1.1, started G0, started G1, started G2",
        3.0: "abort G1/0-0.r1.1, abort G2/0-0.r1.1, close 0, leased G3, open 1, prepared G3, "
        "run G1/0-0.r1.2, run G2/0-0.r1.2, run G3/0-0.r1.1, scored G0, started G3",
        5.0: "scored G2, waiting G1",
        10.0: "close 1, dropped G1, dropped G3",
    }


# --- fully async --------------------------------------------------------------------------------------------------


def test_rollout_and_training_overlap_with_debt_credit_and_backfill(schedule_seed):
    """Two Groups a step, three at work, training 2 s, rows from 2 on take 21 s. The trainer takes each row as it comes.
    At 5 the weights change: step 1 owes two, three Groups are interrupted, so it closes on credit; behind the last
    step the backfill pays train_1 without opening anything, and what is beyond the debt is dropped."""
    taken = []

    async def main(bench):
        config = Config(
            rollout=RolloutConfig(
                rollout_batch_size=2, n_samples_per_prompt=1, fully_async=True, over_sampling_batch_size=3
            ),
            train=TrainConfig(global_batch_size=2, num_iters_per_train_update=2),
        )
        backend = model(dict.fromkeys(range(2, 16), "x" * 20))
        async with training(bench, config, n_steps=2, backend=backend, trainer=FakeTrainer(step_s=2.0)) as loop:
            await loop.run()
            taken.extend((at, step) for at, step, _ in loop.trainer.batches)

    assert timetable(main, schedule_seed) == {
        0.0: "leased G0, leased G1, leased G2, open 0, prepared G0, prepared G1, prepared G2, "
        "run G0/0-0.r1.1, run G1/0-0.r1.1, run G2/0-0.r1.1, started G0, started G1, started G2",
        3.0: "close 0, leased G3, leased G4, open 1, prepared G3, prepared G4, run G3/0-0.r1.1, "
        "run G4/0-0.r1.1, scored G0, scored G1, started G3, started G4",
        5.0: "abort G2/0-0.r1.1, abort G3/0-0.r1.1, abort G4/0-0.r1.1, close 1, credited 2, open 2, "
        "run G2/0-0.r1.2, run G3/0-0.r1.2, run G4/0-0.r1.2, weights 1",
        21.0: "scored G2",
        24.0: "close 2, scored G3, scored G4",
        26.0: "weights 2",
    }
    assert taken == [(3.0, 0), (3.0, 0), (21.0, 1), (24.0, 1)]


def test_a_scored_group_pays_the_older_partition_first(schedule_seed):
    """Row N takes 3 s, from row 2 on 20 + N. At 4.5 step 1 closes on credit; from then on train_1 and train_2 are owed
    two Groups each: the first two that are scored pay train_1, which is trained on before train_2."""
    groups = []

    async def main(bench):
        rollout = RolloutConfig(
            rollout_batch_size=2, n_samples_per_prompt=1, fully_async=True, over_sampling_batch_size=3
        )
        backend = model({row: "x" * (19 + row) for row in range(2, 16)})
        trainer = FakeTrainer(step_s=1.5)
        async with training(bench, Config(rollout=rollout), n_steps=3, backend=backend, trainer=trainer) as loop:
            await loop.run()
            groups.extend([sample.group for sample in rows] for _, rows in loop.trainer.steps)

    assert timetable(main, schedule_seed) == {
        0.0: "leased G0, leased G1, leased G2, open 0, prepared G0, prepared G1, prepared G2, "
        "run G0/0-0.r1.1, run G1/0-0.r1.1, run G2/0-0.r1.1, started G0, started G1, started G2",
        3.0: "close 0, leased G3, leased G4, open 1, prepared G3, prepared G4, run G3/0-0.r1.1, "
        "run G4/0-0.r1.1, scored G0, scored G1, started G3, started G4",
        4.5: "abort G2/0-0.r1.1, abort G3/0-0.r1.1, abort G4/0-0.r1.1, close 1, credited 2, open 2, "
        "run G2/0-0.r1.2, run G3/0-0.r1.2, run G4/0-0.r1.2, weights 1",
        22.5: "leased G5, prepared G5, run G5/0-0.r1.1, scored G2, started G5",
        26.5: "leased G6, prepared G6, run G6/0-0.r1.1, scored G3, started G6",
        27.5: "scored G4",
        28.0: "abort G5/0-0.r1.1, abort G6/0-0.r1.1, close 2, credited 1, open 3, run G5/0-0.r1.2, "
        "run G6/0-0.r1.2, weights 2",
        48.0: "close 3, scored G5",
        49.5: "abort G6/0-0.r1.2, dropped G6, weights 3",
    }
    assert [sorted(step) for step in groups] == [["G0", "G1"], ["G2", "G3"], ["G4", "G5"]]


def test_a_filtered_group_gives_its_budget_back_while_training_overlaps(schedule_seed):
    """Rows 0 and 2 are filtered: each is replaced in the moment of its end, and the debt of its partition is paid."""
    trained = []

    async def main(bench):
        config = Config(
            rollout=RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=1, fully_async=True),
            reward=RewardConfig(dynamic_sampling_filter_path=f"{__name__}.odd_rows"),
        )
        async with training(bench, config, n_steps=2, trainer=FakeTrainer(step_s=10.0)) as loop:
            await loop.run()
            trained.extend(sample.row for _, rows in loop.trainer.steps for sample in rows)
            assert (loop.work.rows.n_taken, loop.work.rows.n_given_back) == (4, 0)

    assert timetable(main, schedule_seed) == {
        0.0: "leased G0, open 0, prepared G0, run G0/0-0.r1.1, started G0",
        3.0: "dropped G0, filtered G0, leased G1, prepared G1, run G1/0-0.r1.1, started G1",
        6.0: "close 0, leased G2, open 1, prepared G2, run G2/0-0.r1.1, scored G1, started G2",
        9.0: "dropped G2, filtered G2, leased G3, prepared G3, run G3/0-0.r1.1, started G3",
        12.0: "close 1, scored G3",
        16.0: "weights 1",
        26.0: "weights 2",
    }
    assert trained == [1, 3]


def test_staleness_counts_the_time_in_queues(schedule_seed):
    """Training takes 10 s. G1 is dispatched and scored under version 0, but waits for the trainer until version 1 is
    trained on: with --max-staleness 0 it is dropped as it is taken, at 13, and replaced in the same moment."""
    trained = []

    async def main(bench):
        config = Config(
            rollout=RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=1, fully_async=True, max_staleness=0)
        )
        async with training(bench, config, n_steps=2, trainer=FakeTrainer(step_s=10.0)) as loop:
            await loop.run()
            trained.extend(sample.group for _, rows in loop.trainer.steps for sample in rows)
            assert loop.work.rows.n_given_back == 1

    assert timetable(main, schedule_seed) == {
        0.0: "leased G0, open 0, prepared G0, run G0/0-0.r1.1, started G0",
        3.0: "close 0, leased G1, open 1, prepared G1, run G1/0-0.r1.1, scored G0, started G1",
        6.0: "close 1, scored G1",
        13.0: "dropped G1, leased G2, prepared G2, run G2/0-0.r1.1, started G2, weights 1",
        16.0: "scored G2",
        26.0: "weights 2",
    }
    assert trained == ["G0", "G2"]


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
