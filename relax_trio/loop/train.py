"""The training loop: rollout, optimizer phase, new weights, evaluation, checkpoint; step after step."""

from __future__ import annotations

import signal
from pathlib import Path

import trio
from attrs import define, field, frozen

from relax_trio.config.tree import Config
from relax_trio.data.dataset import Dataset
from relax_trio.data.json import JsonObject
from relax_trio.data.rows import RowStream
from relax_trio.errors import RelaxTrioError
from relax_trio.events import emit
from relax_trio.ids import WeightVersion
from relax_trio.loop import setup
from relax_trio.loop.evidence import Evidence
from relax_trio.loop.setup import Resume
from relax_trio.observe.rundir import CHECKPOINTS_DIR
from relax_trio.runtime.engine import Engine, open_engine
from relax_trio.runtime.evaluate import EvalDataset, Evaluation
from relax_trio.runtime.shared import Shared, TurnLimits
from relax_trio.runtime.stop import Stop
from relax_trio.runtime.work import Work
from relax_trio.sync.cpu import CpuPool, ThreadCpuPool
from relax_trio.train.base import Trainer
from relax_trio.train.settings import TrainerSettings
from relax_trio.train.trainer import open_trainer


@frozen(kw_only=True)
class RunSummary:
    """How a run ended.

    Attributes:
      n_steps: complete steps, those before a resume included.
      stopped_by: the signal that ended it early.
      checkpoint: the last one written, None when nothing was trained.
    """

    run_dir: Path
    n_steps: int
    stopped_by: signal.Signals | None
    checkpoint: Path | None


@define(eq=False, kw_only=True)
class TrainLoop:
    """One training run over an open work.

    Attributes:
      n_steps: steps of the whole run.
      states: what a checkpoint of each weight version must remember; at most two are kept.
    """

    config: Config
    shared: Shared
    work: Work
    trainer: Trainer
    rows: RowStream
    evidence: Evidence
    datasets: tuple[EvalDataset, ...]
    eval_limits: TurnLimits
    first_step: int
    n_steps: int
    save_dir: Path
    states: dict[WeightVersion, JsonObject] = field(factory=dict)
    saved: WeightVersion | None = None
    checkpoint: Path | None = None

    async def run(self) -> None:
        """Run the steps that are left.

        Raises:
          RelaxTrioError: rollout, reward, training or the hand-over of weights failed.

        Cancellation: the step in hand is given up; an optimizer phase is undone or finished, never left between.
        """
        self.saved = self.trainer.weight_version
        if self.first_step == 0 and self.config.eval.eval_interval is not None:
            await self._evaluate(0)
        for rollout_id in range(self.first_step, self.n_steps):
            await self._run_step(rollout_id)
            n_done = rollout_id + 1
            if self.config.train.save_interval and n_done % self.config.train.save_interval == 0:
                await self.save()
            interval = self.config.eval.eval_interval
            if interval is not None and (n_done % interval == 0 or n_done == self.n_steps):
                await self._evaluate(n_done)

    async def save(self) -> None:
        """Write a checkpoint of the last complete step, unless it is written already."""
        version = self.trainer.weight_version
        if version != self.saved:
            self.checkpoint = await self.trainer.save(self.save_dir, self.states[version])
            self.saved = version

    async def _run_step(self, rollout_id: int) -> None:
        times: dict[str, float] = {}
        started_s = trio.current_time()
        result = await self.work.run_step(rollout_id)
        times["perf/rollout_time"] = result.seconds
        await self.evidence.dump(result)
        self._remember(rollout_id + 1)

        train_started_s = trio.current_time()
        train_metrics = await self.trainer.step(rollout_id, result.samples)
        times["perf/train_time"] = trio.current_time() - train_started_s

        sync_started_s = trio.current_time()
        await self.shared.backend.update_weights(self.trainer.weight_version, self.trainer.weights())
        times["perf/update_weights_time"] = trio.current_time() - sync_started_s
        times["perf/step_time"] = trio.current_time() - started_s
        self.evidence.step(result, train_metrics, times)

    def _remember(self, n_done: int) -> None:
        """Note what the checkpoint of the coming version needs, before the phase that makes it."""
        current = self.trainer.weight_version
        version = WeightVersion(str(n_done))
        state = setup.resume_state(n_done, self.work.next_group, version, self.rows.position())
        self.states = {v: s for v, s in self.states.items() if v == current} | {version: state}

    async def _evaluate(self, n_done: int) -> None:
        for dataset in self.datasets:
            evaluation = Evaluation(
                dataset=dataset, shared=self.shared, limits=self.eval_limits, scorer=self.work.scorer
            )
            await self.evidence.evaluation(n_done, await evaluation.run())


async def train(config: Config, checkpoint: Path, run_dir: Path, stop: Stop) -> RunSummary:
    """Run training to its end, to a signal, or to a failure.

    Args:
      config: checked.
      checkpoint: the model to begin from (`--load` goes on from its own).
      run_dir: gets the evidence and, unless `--save` says otherwise, the checkpoints.

    Raises:
      ConfigError: dataset, checkpoint or hook can't be used.
      RelaxTrioError: the run failed; the last complete step's checkpoint is written before.

    Cancellation: as on the first Ctrl-C, but without the last checkpoint.
    """
    resume = setup.find_resume(config)
    dataset = setup.train_dataset(config)
    datasets = setup.eval_datasets(config)
    n_steps = setup.n_rollout_steps(config, dataset)
    source = checkpoint if resume is None else resume.checkpoint
    version = WeightVersion("0") if resume is None else resume.weight_version
    cpu = ThreadCpuPool(setup.n_cores())
    codec = setup.load_codec(config, source)
    trainer = await open_trainer(
        TrainerSettings.of_config(config, n_steps),
        checkpoint,
        resume=None if resume is None else resume.checkpoint,
    )
    backend = setup.make_backend(config, source, codec, version)
    async with open_engine(config, backend=backend, codec=codec, cpu=cpu, run_dir=run_dir, stop=stop) as engine:
        loop = _make_loop(config, engine, trainer, dataset, datasets, resume, n_steps, cpu, run_dir)
        failure: RelaxTrioError | None = None
        with stop.work():
            async with loop.work.open():
                try:
                    await loop.run()
                except RelaxTrioError as exc:
                    failure = exc
        try:
            await loop.save()
        finally:
            if failure is not None:
                raise failure
    return RunSummary(
        run_dir=run_dir,
        n_steps=int(trainer.weight_version),
        stopped_by=stop.stopped_by,
        checkpoint=loop.checkpoint,
    )


def _make_loop(
    config: Config,
    engine: Engine,
    trainer: Trainer,
    dataset: Dataset,
    datasets: tuple[EvalDataset, ...],
    resume: Resume | None,
    n_steps: int,
    cpu: CpuPool,
    run_dir: Path,
) -> TrainLoop:
    model_len = engine.shared.backend.max_context_len
    rows = setup.make_rows(config, dataset, resume)
    first_step = 0 if resume is None else resume.rollout_id
    work = Work(
        shared=engine.shared,
        config=config.rollout,
        limits=setup.train_limits(config, model_len),
        rows=rows,
        scorer=setup.make_scorer(config, cpu),
        next_group=0 if resume is None else resume.next_group,
        heartbeat_s=config.output.stall_warning,
    )
    emit("run.started", steps=n_steps, first_step=first_step, rows=len(dataset), run_dir=str(run_dir))
    return TrainLoop(
        config=config,
        shared=engine.shared,
        work=work,
        trainer=trainer,
        rows=rows,
        evidence=Evidence.open(config, run_dir, cpu, first_step),
        datasets=datasets,
        eval_limits=setup.eval_limits(config, model_len),
        first_step=first_step,
        n_steps=n_steps,
        save_dir=config.train.save or run_dir / CHECKPOINTS_DIR,
    )
