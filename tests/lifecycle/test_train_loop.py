"""The training loop over fakes: what is trained, evaluated, saved, and remembered for a resume."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest
import trio
from builders_runtime import LIMITS, make_tasks, one_turn_agent, open_work

from relax_trio.config.tree import Config, EvalConfig, RolloutConfig, TrainConfig
from relax_trio.data.rows import RowStream
from relax_trio.errors import TrainError
from relax_trio.loop.evidence import Evidence
from relax_trio.loop.steps import TrainLoop
from relax_trio.observe.metrics import read_metrics
from relax_trio.runtime.evaluate import EvalDataset
from relax_trio.sync.cpu import InlineCpuPool
from relax_trio.train.fake import FakeTrainer


def make_loop(work, tmp_path, *, trainer=None, first_step=0, n_steps=3, save_interval=None, eval_interval=None):
    tmp_path.mkdir(exist_ok=True)
    config = Config(
        rollout=RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2),
        train=TrainConfig(save_interval=save_interval),
        eval=EvalConfig(eval_interval=eval_interval),
    )
    return TrainLoop(
        config=config,
        shared=work.shared,
        work=work,
        trainer=trainer or FakeTrainer(step_s=1.0),
        evidence=Evidence.open(config, tmp_path, InlineCpuPool(), first_step),
        datasets=(EvalDataset(name="held", tasks=make_tasks(2), n_samples=1, concurrency=4),),
        eval_limits=LIMITS,
        first_step=first_step,
        n_steps=n_steps,
        save_dir=tmp_path / "checkpoints",
    )


def written(run_dir):
    return read_metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []


async def test_steps_train_update_save_and_evaluate_in_their_order(autojump_clock, tmp_path):
    async with open_work() as work:
        loop = make_loop(work, tmp_path, save_interval=2, eval_interval=2)
        await loop.run()
        await loop.save()

        assert [call.what for call in work.shared.backend.calls if call.name == "update_weights"] == ["1", "2", "3"]
    assert [step["rollout_id"] for step in read_metrics(tmp_path)] == [0, 1, 2]
    for step in read_metrics(tmp_path):
        assert step["rollout/raw_reward"] == 1.0
        assert (step["perf/rollout_time"], step["perf/train_time"]) == (3.0, 1.0)
        assert step["perf/train_tokens_per_s"] > 0
        assert step["perf/peak_memory_gib"] > 0.01
    assert ["perf/save_time" in step for step in read_metrics(tmp_path)] == [False, False, True], (
        "in the step behind it"
    )
    evals = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert [(e["n_steps"], e["eval/held"]) for e in evals] == [(0, 1.0), (2, 1.0), (3, 1.0)]
    assert [state["rollout_id"] for _, state in loop.trainer.saves] == [2, 3]


async def test_the_engines_memory_is_the_trainers_from_the_phase_to_the_new_weights_and_nowhere_else(
    autojump_clock, tmp_path
):
    lent = []

    @asynccontextmanager
    async def lend_memory():
        assert loop.trainer.weight_version == str(len(lent)), "before the phase"
        since = trio.current_time()
        yield
        lent.append((since, trio.current_time()))
        assert work.shared.backend.weight_version == loop.trainer.weight_version == str(len(lent)), "after the update"

    async with open_work() as work:
        loop = make_loop(work, tmp_path, n_steps=2, eval_interval=1)
        loop.lend_memory = lend_memory
        await loop.run()
    assert [until - since for since, until in lent] == [1.0, 1.0]
    calls = work.shared.backend.calls
    generated = [call.at for call in calls if call.name == "generate"]
    assert not [at for at in generated for since, until in lent if since < at < until]
    updates = [call.at for call in calls if call.name == "update_weights"]
    assert updates == [until for _, until in lent]


async def test_the_state_of_a_checkpoint_goes_on_where_its_step_ended(autojump_clock, tmp_path):
    async with open_work() as work:
        loop = make_loop(work, tmp_path, n_steps=2)
        await loop.run()
        await loop.save()
    state = loop.trainer.saves[-1][1]
    rows = RowStream(rows=make_tasks(8), seed=1, shuffle=False)

    rows.restore(state["rows"])

    assert (state["rollout_id"], state["next_group"], state["weight_version"]) == (2, 4, "2")
    assert rows.take().row == 4


async def test_a_stop_in_a_phase_saves_a_whole_step(autojump_clock, tmp_path):
    """Cancelled at any moment, the checkpoint's state is that of the weights it holds."""
    for stop_at in (1.0, 3.5, 4.5, 7.2, 7.9):
        async with open_work() as work:
            loop = make_loop(work, tmp_path / str(stop_at), n_steps=3)
            with trio.move_on_after(stop_at):
                await loop.run()
            version = loop.trainer.weight_version
            await loop.save()
        assert [state["weight_version"] for _, state in loop.trainer.saves] == ([version] if version != "0" else [])
        assert [step["rollout_id"] for step in written(tmp_path / str(stop_at))] == list(range(int(version)))


async def test_a_resumed_run_repeats_no_evaluation_and_makes_up_the_missing_one(autojump_clock, tmp_path):
    def evaluations():
        return [json.loads(line)["n_steps"] for line in (tmp_path / "eval.jsonl").read_text().splitlines()]

    async with open_work() as work:
        loop = make_loop(work, tmp_path, n_steps=2, eval_interval=1)
        with trio.move_on_after(15.0):  # the evaluation after step 2 stands open
            await loop.run()
    assert evaluations() == [0, 1]
    assert [step["rollout_id"] for step in written(tmp_path)] == [0, 1]
    async with open_work() as work:
        await make_loop(work, tmp_path, n_steps=2, first_step=2, eval_interval=1).run()
    assert evaluations() == [0, 1, 2]
    async with open_work() as work:
        await make_loop(work, tmp_path, n_steps=2, first_step=1, eval_interval=1).run()
    assert evaluations() == [0, 1, 2]
    assert [step["rollout_id"] for step in written(tmp_path)] == [0, 1]


async def test_a_training_failure_keeps_what_was_complete(autojump_clock, tmp_path):
    trainer = FakeTrainer(step_s=1.0, failures={1: TrainError("out of memory")})
    async with open_work(one_turn_agent) as work:
        loop = make_loop(work, tmp_path, trainer=trainer)
        with pytest.raises(TrainError, match="out of memory"):
            await loop.run()
        await loop.save()

    assert [step["rollout_id"] for step in read_metrics(tmp_path)] == [0]
    assert [state["rollout_id"] for _, state in trainer.saves] == [1]


async def test_a_save_that_fails_after_a_failure_does_not_hide_it(autojump_clock, tmp_path, events, monkeypatch):
    async def full_disk(trainer, directory, state):
        await trio.lowlevel.checkpoint()
        raise TrainError("no space left")

    trainer = FakeTrainer(step_s=1.0, failures={1: TrainError("out of memory")})
    monkeypatch.setattr(FakeTrainer, "save", full_disk)
    async with open_work() as work:
        loop = make_loop(work, tmp_path, trainer=trainer)
        with pytest.raises(TrainError, match="out of memory"):
            await loop.run()
        await loop.save_after_failure()

    assert [e.fields["error"] for e in events if e.name == "checkpoint.failed"] == ["no space left"]
