"""Scenarios of whole training runs for the cancellation explorer: the loops over a bench, with files of evidence."""

from __future__ import annotations

import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

from scenarios import SLOW, ask, model

from relax_trio.config.tree import Config, EvalConfig, RolloutConfig, TrainConfig
from relax_trio.loop.evidence import Evidence
from relax_trio.loop.overlap import OverlapLoop
from relax_trio.loop.steps import TrainLoop
from relax_trio.observe.metrics import read_metrics
from relax_trio.runtime.evaluate import EvalDataset
from relax_trio.sync.cpu import InlineCpuPool
from relax_trio.testing import LIMITS, Bench, make_rows
from relax_trio.train.fake import FakeTrainer

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Checkpoints are synced to their disk, which takes longer than all the rest of a run."""


@asynccontextmanager
async def training(bench: Bench, config: Config, *, n_steps, backend=None, trainer=None):
    """A run as `loop/train.py` makes it: save what is complete, whatever ends the work. Checks what it leaves."""
    with tempfile.TemporaryDirectory(prefix="relax-trio-", dir=MEMORY) as name:
        run_dir, loop = Path(name), None
        async with bench.engine(ask, backend=backend) as shared:
            try:
                async with bench.open_work(config.rollout, reward=config.reward, n_steps=n_steps) as work:
                    kind = OverlapLoop if config.rollout.fully_async else TrainLoop
                    loop = kind(
                        config=config,
                        shared=shared,
                        work=work,
                        trainer=trainer or FakeTrainer(step_s=1.0, save_s=0.5),
                        evidence=Evidence.open(config, run_dir, InlineCpuPool(), 0),
                        datasets=(EvalDataset(name="held", tasks=make_rows(1), n_samples=1, concurrency=1),),
                        eval_limits=LIMITS,
                        first_step=0,
                        n_steps=n_steps,
                        save_dir=run_dir / "checkpoints",
                    )
                    yield loop
                if loop is not None:
                    await loop.save()
            except BaseException:
                if loop is not None:
                    await loop.save_after_failure()
                raise
            finally:
                if loop is not None and config.reward.dynamic_sampling_filter_path is None:
                    check_evidence(loop, run_dir)  # which counts no filtered rows


def check_evidence(loop: TrainLoop, run_dir: Path) -> None:
    """Every trained step is written down and saved, and each checkpoint accounts for the rows it has not trained."""
    trainer = loop.trainer
    steps = read_metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []
    assert [step["rollout_id"] for step in steps] == list(range(trainer.n_phases))
    assert [state["weight_version"] for _, state in trainer.saves][-1:] == ([str(trainer.n_phases)] if steps else [])
    for _, state in trainer.saves:
        trained = [rows for _, rows in trainer.steps[: state["rollout_id"]]]
        n_trained = sum(len({sample.group for sample in rows}) for rows in trained)
        rows = state["rows"]
        assert rows["n_taken"] == n_trained + rows["n_given_back"], "a resumed run would lose or repeat a row"


async def shutdown_in_each_phase(bench: Bench) -> None:
    """Evaluation, rollout, optimizer phase, hand-over of weights and checkpoint, one after another, twice."""
    config = Config(
        rollout=RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=2),
        train=TrainConfig(save_interval=1),
        eval=EvalConfig(eval_interval=1),
    )
    async with training(bench, config, n_steps=2) as loop:
        await loop.run()


async def paused_but_for_evaluation(bench: Bench) -> None:
    """Attempts are paused from one step to the next, and aborted at the close that an evaluation follows."""
    config = Config(
        rollout=RolloutConfig(
            rollout_batch_size=1,
            n_samples_per_prompt=1,
            partial_rollout=True,
            partial_rollout_pause="in_place",
            over_sampling_batch_size=2,
        ),
        train=TrainConfig(save_interval=1),
        eval=EvalConfig(eval_interval=2),
    )
    async with training(bench, config, n_steps=3, backend=model(dict.fromkeys(range(1, 16, 2), SLOW))) as loop:
        await loop.run()


async def fully_async_close_and_backfill(bench: Bench) -> None:
    """Windows close on credit, debt is paid later, the backfill pays the rest; the trainer takes rows in batches."""
    config = Config(
        rollout=RolloutConfig(
            rollout_batch_size=2, n_samples_per_prompt=1, fully_async=True, over_sampling_batch_size=3
        ),
        train=TrainConfig(global_batch_size=2, num_iters_per_train_update=2),
    )
    backend = model(dict.fromkeys(range(2, 16), SLOW))
    async with training(bench, config, n_steps=2, backend=backend) as loop:
        await loop.run()
        assert all(len(rows) == 2 for _, rows in loop.trainer.steps)


async def max_staleness_drop(bench: Bench) -> None:
    """A row that takes long is scored too late to be trained on: its Group is dropped and replenished."""
    config = Config(
        rollout=RolloutConfig(
            rollout_batch_size=1,
            n_samples_per_prompt=1,
            fully_async=True,
            over_sampling_batch_size=2,
            max_staleness=0,
        )
    )
    backend = model({1: "takes"})
    async with training(bench, config, n_steps=3, backend=backend) as loop:
        await loop.run()
        assert all(len(rows) == 1 for _, rows in loop.trainer.steps)


async def fully_async_with_evaluation(bench: Bench) -> None:
    """The trainer is slower than rollout, evaluates and saves while two partitions are open, with prelaunch."""
    config = Config(
        rollout=RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=1, fully_async=True, agentic_prelaunch=True),
        train=TrainConfig(save_interval=1),
        eval=EvalConfig(eval_interval=2),
    )
    async with training(bench, config, n_steps=3, trainer=FakeTrainer(step_s=10.0)) as loop:
        await loop.run()
