"""The training loop: rollout, optimizer phase, new weights, evaluation, checkpoint; step after step."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import trio
from attrs import define, field, frozen

from relax_trio.config.tree import Config
from relax_trio.data.json import JsonObject
from relax_trio.errors import TrainError
from relax_trio.events import emit
from relax_trio.ids import WeightVersion
from relax_trio.loop import setup
from relax_trio.loop.evidence import Evidence
from relax_trio.loop.setup import Resume, RunData
from relax_trio.loop.start import tell_operator
from relax_trio.observe.rundir import CHECKPOINTS_DIR
from relax_trio.runtime.engine import Engine, open_engine
from relax_trio.runtime.evaluate import EvalDataset, Evaluation
from relax_trio.runtime.shared import Shared, TurnLimits
from relax_trio.runtime.stop import Stop
from relax_trio.runtime.work import Work
from relax_trio.sync.cleanup import MAX_CLEANUP_S, cleanup_scope
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
      update_s: seconds of handing over the weights that the coming step runs on.
    """

    config: Config
    shared: Shared
    work: Work
    trainer: Trainer
    evidence: Evidence
    datasets: tuple[EvalDataset, ...]
    eval_limits: TurnLimits
    first_step: int
    n_steps: int
    save_dir: Path
    states: dict[WeightVersion, JsonObject] = field(factory=dict)
    saved: WeightVersion | None = None
    checkpoint: Path | None = None
    update_s: float = 0.0

    async def run(self) -> None:
        """Run the steps that are left.

        Raises:
          RelaxTrioError: rollout, reward, training or the hand-over of weights failed.

        Cancellation: the step in hand is given up; an optimizer phase is undone or finished, never left between.
        """
        self.saved = self.trainer.weight_version
        await self._evaluate_if_due(self.first_step)
        for rollout_id in range(self.first_step, self.n_steps):
            await self._run_step(rollout_id)
            n_done = rollout_id + 1
            if self.config.train.save_interval and n_done % self.config.train.save_interval == 0:
                await self.save()
            await self._evaluate_if_due(n_done)

    async def save(self) -> None:
        """Write a checkpoint of the last complete step, unless it is written already."""
        version = self.trainer.weight_version
        if version != self.saved:
            self.checkpoint = await self.trainer.save(self.save_dir, self.states[version])
            self.saved = version

    async def save_after_failure(self) -> None:
        """Save for a service that died, a bug, a full disk: what was trained is worth a checkpoint all the same.

        A save that fails too is told as event `checkpoint.failed`: the first failure is what the user has to see.

        Cancellation: shielded, at most `MAX_CLEANUP_S`.
        """
        with cleanup_scope(MAX_CLEANUP_S, "checkpoint of the last complete step"):
            try:
                await self.save()
            except TrainError as exc:
                emit("checkpoint.failed", error=str(exc))

    async def _run_step(self, rollout_id: int) -> None:
        result = await self.work.run_step(rollout_id)
        await self.evidence.dump(result)
        self._remember(rollout_id + 1)
        started_s = trio.current_time()
        train_metrics = await self.trainer.step(rollout_id, result.samples)
        train_s = trio.current_time() - started_s
        # Without a checkpoint in between: a step that is trained is written down, whatever stops the run now.
        times = {
            "perf/rollout_time": result.seconds,
            "perf/train_time": train_s,
            "perf/step_time": result.seconds + train_s,
            "perf/update_weights_time": self.update_s,
        }
        self.evidence.step(result, train_metrics, times)
        started_s = trio.current_time()
        await self.shared.backend.update_weights(self.trainer.weight_version, self.trainer.weights())
        self.update_s = trio.current_time() - started_s

    def _remember(self, n_done: int) -> None:
        """Note what the checkpoint of the coming version needs, before the phase that makes it."""
        current = self.trainer.weight_version
        version = WeightVersion(str(n_done))
        state = setup.resume_state(self.work, n_done, version, self.evidence.run_dir)
        self.states = {v: s for v, s in self.states.items() if v == current} | {version: state}

    async def _evaluate_if_due(self, n_done: int) -> None:
        """Evaluate before the first step, at the interval and at the end, unless a resumed run has done it."""
        interval = self.config.eval.eval_interval
        if interval is None or (n_done % interval and n_done != self.n_steps):
            return
        for dataset in self.datasets:
            if self.evidence.has_evaluation(n_done, dataset.name):
                continue
            evaluation = Evaluation(
                dataset=dataset,
                shared=self.shared,
                limits=self.eval_limits,
                scorer=self.work.scorer,
                session_retries=self.config.rollout.agentic_session_retries,
                agent_retries=self.config.rollout.agentic_agent_retries,
            )
            self.evidence.evaluation(n_done, await evaluation.run())


async def train(config: Config, data: RunData, checkpoint: Path, run_dir: Path, stop: Stop) -> RunSummary:
    """Run training to its end, to a signal, or to a failure.

    Args:
      config: checked.
      data: from `load_data`.
      checkpoint: the model to begin from (`--load` goes on from its own).
      run_dir: gets the evidence and, unless `--save` says otherwise, the checkpoints.

    Raises:
      ConfigError: checkpoint or hook can't be used.
      RelaxTrioError: the run failed, alone or in groups; the last complete step's checkpoint is written before.

    Cancellation: as on the first Ctrl-C; the last checkpoint is bounded.
    """
    setup.seed_globals(config.train.seed)
    setup.make_save_dir(config.train.save or run_dir / CHECKPOINTS_DIR)
    resume = setup.find_resume(config)
    n_steps = setup.n_rollout_steps(config, data.rows)
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
        loop = _make_loop(config, engine, trainer, data, resume, n_steps, cpu, run_dir)
        tell_operator(engine)
        try:
            with stop.work():
                async with loop.work.open():
                    await loop.run()
        except BaseException:
            await loop.save_after_failure()
            raise
        await loop.save()
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
    data: RunData,
    resume: Resume | None,
    n_steps: int,
    cpu: CpuPool,
    run_dir: Path,
) -> TrainLoop:
    model_len = engine.shared.backend.max_context_len
    rows = setup.make_rows(config, data.rows, resume)
    first_step = 0 if resume is None else resume.rollout_id
    work = Work(
        shared=engine.shared,
        config=config.rollout,
        limits=setup.train_limits(config, model_len),
        rows=rows,
        scorer=setup.make_scorer(config, cpu),
        next_group=0 if resume is None else resume.next_group,
        row_failures=Counter({} if resume is None else resume.row_failures),
        heartbeat_s=config.output.stall_warning,
        n_steps=n_steps,
    )
    emit("run.started", steps=n_steps, first_step=first_step, rows=len(data.rows), run_dir=str(run_dir))
    return TrainLoop(
        config=config,
        shared=engine.shared,
        work=work,
        trainer=trainer,
        evidence=Evidence.open(config, run_dir, cpu, first_step),
        datasets=data.evaluation,
        eval_limits=setup.eval_limits(config, model_len),
        first_step=first_step,
        n_steps=n_steps,
        save_dir=config.train.save or run_dir / CHECKPOINTS_DIR,
    )
