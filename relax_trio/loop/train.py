"""A training run: its services, its trainer, its loop, and its end."""

from __future__ import annotations

import signal
from collections import Counter
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

from attrs import frozen

from relax_trio.config.eval_spec import required_slots
from relax_trio.config.tree import Config
from relax_trio.events import emit
from relax_trio.ids import WeightVersion
from relax_trio.loop import servers, setup
from relax_trio.loop.evidence import Evidence
from relax_trio.loop.overlap import OverlapLoop
from relax_trio.loop.setup import Resume, RunData
from relax_trio.loop.start import tell_operator
from relax_trio.loop.steps import TrainLoop
from relax_trio.observe.rundir import CHECKPOINTS_DIR
from relax_trio.observe.writers import open_writers
from relax_trio.reward.reward import RewardScorer
from relax_trio.runtime.engine import Engine
from relax_trio.runtime.stop import Stop
from relax_trio.runtime.work import Work
from relax_trio.sync.cpu import ThreadCpuPool
from relax_trio.train.base import Trainer
from relax_trio.train.lora import ADAPTER_DIR
from relax_trio.train.processes import open_process_trainer
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
    scorer = setup.make_scorer(config, cpu)
    codec = setup.load_codec(config, source)
    settings = TrainerSettings.of_config(config, n_steps)
    go_on = None if resume is None else resume.checkpoint
    served, adapter = source, None
    if config.backend.sglang_lora_transfer == "adapter":
        # The checkpoint that a run goes on from has its adapter merged; servers keep what is under it.
        served, adapter = checkpoint, None if go_on is None else go_on / ADAPTER_DIR
    own = None if config.train.trainer_processes else await open_trainer(settings, checkpoint, resume=go_on)
    first_step = 0 if resume is None else resume.rollout_id
    async with (
        open_writers(config, run_dir, first_step, cpu) as writers,
        servers.open_run_engine(
            config, served, codec, version, cpu=cpu, run_dir=run_dir, adapter=adapter, stop=stop
        ) as engine,
        nullcontext(own) if own else _processes(config, settings, checkpoint, go_on, engine, run_dir) as trainer,
    ):
        evidence = Evidence.open(config, run_dir, cpu, first_step, writers)
        loop = _make_loop(config, engine, trainer, data, resume, n_steps, scorer, evidence)
        tell_operator(engine)
        try:
            with stop.work():
                async with loop.work.open():
                    await loop.run()
        except BaseException:  # a stop, too: whatever ends the work, what was trained is saved
            await loop.save_after_failure()
            raise
        await loop.save()
    return RunSummary(
        run_dir=run_dir,
        n_steps=int(trainer.weight_version),
        stopped_by=stop.stopped_by,
        checkpoint=loop.checkpoint,
    )


def _processes(
    config: Config, settings: TrainerSettings, checkpoint: Path, resume: Path | None, engine: Engine, run_dir: Path
) -> AbstractAsyncContextManager[Trainer]:
    """The trainer of `--trainer-processes`: it is the engine's warden who starts them."""
    return open_process_trainer(
        settings,
        checkpoint,
        n=config.train.trainer_processes,
        warden=engine.warden,
        run_dir=run_dir,
        temp_root=engine.temp_root,
        seed=config.train.seed,
        resume=resume,
    )


def _make_loop(
    config: Config,
    engine: Engine,
    trainer: Trainer,
    data: RunData,
    resume: Resume | None,
    n_steps: int,
    scorer: RewardScorer,
    evidence: Evidence,
) -> TrainLoop:
    model_len = engine.shared.backend.max_context_len
    rows = setup.make_rows(config, data.rows, resume)
    first_step = 0 if resume is None else resume.rollout_id
    work = Work(
        shared=engine.shared,
        config=config.rollout,
        limits=setup.train_limits(config, model_len),
        rows=rows,
        scorer=scorer,
        next_group=0 if resume is None else resume.next_group,
        row_failures=Counter({} if resume is None else resume.row_failures),
        heartbeat_s=config.output.stall_warning,
        n_steps=n_steps,
    )
    emit("capacity.planned", agents=required_slots(config), train=config.rollout.n_train_sessions)
    emit("run.started", steps=n_steps, first_step=first_step, rows=len(data.rows), run_dir=str(evidence.run_dir))
    kind = OverlapLoop if config.rollout.fully_async else TrainLoop
    return kind(
        config=config,
        shared=engine.shared,
        work=work,
        trainer=trainer,
        evidence=evidence,
        datasets=data.evaluation,
        eval_limits=setup.eval_limits(config, model_len),
        first_step=first_step,
        n_steps=n_steps,
        save_dir=config.train.save or evidence.run_dir / CHECKPOINTS_DIR,
        lend_memory=servers.lend_memory(config, engine.shared.backend),
    )
