"""Rules of docs/lifecycle.md for Groups that outlive a step (partial rollout, fully async), as timetables: see
tests/builders_rules.py.
"""

from __future__ import annotations

import pytest
import trio
from builders_rules import HOOKS, timetable, without_reward
from scenarios import ask, model, row_of
from scenarios_loop import training

from relax_trio.backend.base import WeightSource
from relax_trio.config.tree import Config, RewardConfig, RolloutConfig, TrainConfig
from relax_trio.errors import CreditError
from relax_trio.testing import prompt_of
from relax_trio.train.fake import FakeTrainer

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
        reward = RewardConfig(custom_rm_path=f"{HOOKS}.late_for_group_one")
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
            reward=RewardConfig(dynamic_sampling_filter_path=f"{HOOKS}.odd_rows"),
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
