"""Fully async on the virtual clock: windows, debt, credit, batches as they come, staleness, backfill."""

from __future__ import annotations

import re
import sys
import types
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import trio
from builders_runtime import LIMITS, answer, make_tasks, open_work, user

from relax_trio.agent.fake import AgentExit
from relax_trio.backend.fake import FakeBackend
from relax_trio.config.tree import Config, EvalConfig, RewardConfig, RolloutConfig, TrainConfig
from relax_trio.data.rows import RowStream
from relax_trio.errors import TrainError
from relax_trio.loop.evidence import Evidence
from relax_trio.loop.overlap import OverlapLoop
from relax_trio.observe.metrics import read_metrics
from relax_trio.reward.reward import RewardScorer
from relax_trio.runtime.evaluate import EvalDataset
from relax_trio.sync.cpu import InlineCpuPool
from relax_trio.train.fake import FakeTrainer


def row_of(attempt):
    """The row that an attempt's opening names."""
    text = bytes(t - 1 for t in attempt.token_ids if t).decode()
    return int(re.search(r"<user>q(\d+)", text).group(1))


def seconds(of_row):
    """A backend whose turn about a row takes `of_row(row)` seconds, at one token a second."""
    return FakeBackend(lambda attempt: answer("x" * (of_row(row_of(attempt)) - 1)), tokens_per_s=1.0)


async def ask(agent):
    """One turn about the row, reward 1."""
    await agent.client.chat(agent, user(agent.session_input["messages"][0]["content"]))
    agent.write_output({"reward": 1.0})


@asynccontextmanager
async def open_loop(
    tmp_path, of_row, agent=ask, *, n_steps=3, trainer=None, train=None, evaluate=None, reward=None, **rollout
):
    """A fully async run of two Groups of one Session a step."""
    rollout = {"n_samples_per_prompt": 1, "rollout_batch_size": 2, "fully_async": True, **rollout}
    async with open_work(agent, n_rows=32, backend=seconds(of_row), reward=reward, **rollout) as work:
        work.n_steps = n_steps
        config = Config(
            rollout=RolloutConfig(**rollout),
            train=TrainConfig(**(train or {})),
            eval=EvalConfig(eval_interval=evaluate),
        )
        yield OverlapLoop(
            config=config,
            shared=work.shared,
            work=work,
            trainer=trainer or FakeTrainer(step_s=1.0),
            evidence=Evidence.open(config, tmp_path, InlineCpuPool(), 0),
            datasets=(EvalDataset(name="held", tasks=make_tasks(2), n_samples=1, concurrency=4),),
            eval_limits=LIMITS,
            first_step=0,
            n_steps=n_steps,
            save_dir=tmp_path / "checkpoints",
        )


def updates(work):
    return [(call.at, call.what) for call in work.shared.backend.calls if call.name == "update_weights"]


def trained(trainer):
    return [[sample.row for sample in rows] for _, rows in trainer.steps]


def conserved(work, n_trained):
    rows = work.rows
    return rows.n_taken == n_trained + rows.n_given_back + len(rows.set_aside_rows)


async def test_rollout_of_a_step_overlaps_the_training_of_the_one_before(autojump_clock, tmp_path):
    """Rollout takes 3 s a step, training 10: the second step is ready long before the first is trained on."""
    async with open_loop(tmp_path, lambda row: 3, trainer=FakeTrainer(step_s=10.0)) as loop:
        await loop.run()
        work = loop.work
        generated = [call.at for call in work.shared.backend.calls if call.name == "generate"]

    # step 0: 0 to 3; step 1: 3 to 6; step 2 has to wait for train_0, which is sealed at 13
    assert generated == [0.0, 0.0, 3.0, 3.0, 13.0, 13.0]
    assert updates(work) == [(13.0, "1"), (23.0, "2"), (33.0, "3")]
    assert sorted(map(sorted, trained(loop.trainer))) == [[0, 1], [2, 3], [4, 5]]
    assert conserved(work, 6)
    assert [step["rollout_id"] for step in read_metrics(tmp_path)] == [0, 1, 2]


async def test_the_trainer_takes_rows_in_batches_as_they_come(autojump_clock, tmp_path):
    """Four rows a step, ending at 2, 4, 6 and 8 s: two batches of two, the first one at 4."""
    async with open_loop(
        tmp_path,
        lambda row: 2 * (row % 4 + 1),
        rollout_batch_size=4,
        n_steps=1,
        train={"global_batch_size": 4, "num_iters_per_train_update": 2},
    ) as loop:
        await loop.run()

    assert loop.trainer.batches == [(4.0, 0, 2), (8.0, 0, 2)]
    assert trained(loop.trainer) == [[0, 1, 2, 3]]


async def test_a_change_of_weights_finds_no_attempt_running_and_turns_go_on_under_both(autojump_clock, tmp_path):
    """Step 1 runs from 3 on; at 4 the weights change: 1 token is of version 0, the rest of version 1."""
    async with open_loop(tmp_path, lambda row: 3 if row < 2 else 20, n_steps=2) as loop:
        running = []
        update = loop.shared.backend.update_weights

        async def watched(version, source):
            running.append(loop.shared.backend.load().n_running)
            await update(version, source)

        loop.shared.backend.update_weights = watched
        await loop.run()

    assert running == [0, 0]
    for sample in loop.trainer.steps[1][1]:
        assert [(span.version, span.n_tokens) for span in sample.weight_versions] == [("0", 1), ("1", 19)]


async def test_a_window_closes_on_credit_and_its_debt_is_paid_first(autojump_clock, tmp_path, events):
    """Step 1 owes two at the change of weights at 4, and two Groups are interrupted: it closes with its debt.

    Step 2 opens then; the first two Groups scored pay train_1, though step 2 is open.
    """
    async with open_loop(
        tmp_path, lambda row: {0: 3, 1: 3, 2: 20, 3: 20}.get(row, 5), over_sampling_batch_size=4
    ) as loop:
        await loop.run()
        work = loop.work

    (credit, *_) = [e.fields for e in events if e.name == "step.credited"]
    assert (credit["rollout"], credit["debt"]) == (1, 2)
    ends = [(e.fields["rollout"], e.fields["debt"]) for e in events if e.name == "accounting_end"]
    assert ends[:2] == [(0, 0), (1, 2)]
    assert len(trained(loop.trainer)) == 3
    assert all(len(rows) == 2 for rows in trained(loop.trainer))
    assert conserved(work, 6)


async def test_a_window_with_too_few_interrupted_groups_stays_open(autojump_clock, tmp_path, events):
    """One Group is at work while two are owed: no credit at the change of weights."""
    async with open_loop(
        tmp_path, lambda row: {0: 3, 1: 3}.get(row, 20), agentic_concurrency=1, over_sampling_batch_size=2, n_steps=2
    ) as loop:
        await loop.run()

    assert [e.name for e in events if e.name == "step.credited"] == []


async def test_the_backfill_pays_what_is_owed_after_the_last_step_without_oversampling(
    autojump_clock, tmp_path, events
):
    """The last window closes on credit at 4 with a debt of two; the backfill pays it and starts nothing new."""
    async with open_loop(tmp_path, lambda row: 3 if row < 2 else 20, n_steps=2, over_sampling_batch_size=3) as loop:
        await loop.run()
        work = loop.work
        assert not work.residents.all

    windows = [(e.fields["rollout"], e.fields["groups"]) for e in events if e.name == "accounting_start"]
    assert windows == [(0, 2), (1, 2), (2, 0)]
    assert all(len(rows) == 2 for rows in trained(loop.trainer))
    assert conserved(work, 4)


async def test_a_group_that_is_too_stale_is_dropped_replenished_and_given_back(autojump_clock, tmp_path, events):
    """Row 2 takes 10 s: dispatched under version 0, it would be trained under version 2."""
    async with open_loop(
        tmp_path, lambda row: 10 if row == 2 else 3, n_steps=6, over_sampling_batch_size=3, max_staleness=1
    ) as loop:
        await loop.run()
        work = loop.work

    stale = [e.fields for e in events if e.name == "group.dropped" and "--max-staleness" in e.fields["reason"]]
    assert [fields["group"] for fields in stale] == ["G2"]
    assert all(len(rows) == 2 for rows in trained(loop.trainer))
    for version, (_, rows) in enumerate(loop.trainer.steps):
        assert all(version - int(sample.weight_versions[0].version) <= 1 for sample in rows)
    assert conserved(work, 12)
    assert sum(step["rollout/n_stale_groups"] for step in read_metrics(tmp_path)) == 1


async def test_evaluation_runs_while_rollout_goes_on(autojump_clock, tmp_path):
    async with open_loop(tmp_path, lambda row: 3, n_steps=2, evaluate=1) as loop:
        await loop.run()

    assert (tmp_path / "eval.jsonl").read_text().count("\n") == 3


async def test_a_checkpoint_in_the_middle_of_rollout_loses_no_row(autojump_clock, tmp_path):
    """Saved after step 0, while rows 2 and 3 are at work: a resumed run takes those first."""
    async with open_loop(tmp_path, lambda row: 3 if row < 2 else 50, n_steps=2, train={"save_interval": 1}) as loop:
        await loop.run()
    state = loop.trainer.saves[0][1]
    rows = RowStream(rows=make_tasks(32), seed=1, shuffle=False)
    rows.restore(state["rows"])
    assert [rows.take().row for _ in range(3)] == [2, 3, 4]


@pytest.mark.parametrize("fails", ["training", "credit", "agents"])
async def test_a_failure_on_either_side_ends_the_run(autojump_clock, tmp_path, fails):
    async def agent(agent):
        if fails == "agents" and agent.session_input["metadata"]["row"] > 2:
            raise AgentExit(3)
        await agent.client.chat(agent, user(agent.session_input["messages"][0]["content"]))
        if fails != "credit" or agent.session_input["metadata"]["row"] < 2:
            agent.write_output({"reward": 1.0})

    failures = {1: TrainError("out of memory")} if fails == "training" else {}
    async with open_loop(tmp_path, lambda row: 3, agent, trainer=FakeTrainer(failures=failures)) as loop:
        with pytest.raises(BaseException) as caught:  # noqa: PT011 - its kind is looked at below
            await loop.run()

    kinds = {"training": "out of memory", "credit": "reward", "agents": "in a row failed"}
    assert kinds[fails] in str(flatten(caught.value))
    assert loop.trainer.n_phases == (0 if fails == "agents" else 1), "agents fail while step 0 is trained on"


def flatten(error):
    return (
        [str(e) for one in error.exceptions for e in flatten(one)] if isinstance(error, BaseExceptionGroup) else [error]
    )


@pytest.mark.parametrize("stop_at", [0.0, 1.0, 3.0, 3.5, 4.0, 4.5, 6.0, 8.2, 11.9])
async def test_a_stop_at_any_moment_leaves_nothing_and_gives_every_row_back(autojump_clock, tmp_path, stop_at):
    async with open_loop(tmp_path, lambda row: 2 + row % 5, over_sampling_batch_size=3, agentic_prelaunch=True) as loop:
        with trio.move_on_after(stop_at):
            await loop.run()
        work = loop.work
    n_trained = sum(len(rows) for rows in trained(loop.trainer)[: loop.trainer.n_phases])
    assert conserved(work, n_trained)
    assert (
        [step["rollout_id"] for step in read_metrics(tmp_path)] == list(range(loop.trainer.n_phases))
        if (tmp_path / "metrics.jsonl").exists()
        else loop.trainer.n_phases == 0
    )


async def test_the_contexts_of_a_session_reach_the_trainer_in_one_batch(autojump_clock, tmp_path, monkeypatch):
    """Two contexts a Session, batches of one Session: two rows each. FakeTrainer refuses a Session in two batches."""
    module = types.ModuleType("advantage_under_test")
    module.fn = lambda slots: [dict.fromkeys(slot, 1.0) for slot in slots]
    monkeypatch.setitem(sys.modules, "advantage_under_test", module)

    async def agent(agent):
        question = user(agent.session_input["messages"][0]["content"])
        reply = await agent.client.chat(agent, question)
        more = await agent.client.chat(agent, question, reply, user("more"))
        histories = {"first": [question, reply], "whole": [question, reply, user("more"), more]}
        agent.write_output(
            *({"name": name, "messages": [m.to_chat() for m in history]} for name, history in histories.items())
        )

    config = RewardConfig(agentic_custom_advantage_path="advantage_under_test.fn")
    scorer = RewardScorer(config, SimpleNamespace(use_dynamic_batch_size=True), InlineCpuPool())
    async with open_loop(
        tmp_path, lambda row: 3, agent, n_steps=2, reward=scorer, train={"global_batch_size": 1}
    ) as loop:
        await loop.run()

    assert [n_rows for _, _, n_rows in loop.trainer.batches] == [2, 2, 2, 2]
