"""Rollout without training: run steps with the weights as they are and write their samples."""

from __future__ import annotations

from pathlib import Path

from relax_trio.config.tree import Config
from relax_trio.events import emit
from relax_trio.ids import WeightVersion
from relax_trio.loop import servers, setup
from relax_trio.loop.evidence import Evidence
from relax_trio.loop.setup import RunData
from relax_trio.loop.start import collect_garbage, tell_operator
from relax_trio.loop.train import RunSummary
from relax_trio.runtime.stop import Stop
from relax_trio.runtime.work import Work
from relax_trio.sync.cpu import ThreadCpuPool


async def rollout(config: Config, data: RunData, checkpoint: Path, run_dir: Path, stop: Stop) -> RunSummary:
    """Run `--num-rollout` steps (default: one epoch) and write each step's samples and metrics.

    Raises:
      ConfigError: checkpoint or hook can't be used.
      RelaxTrioError: the run failed; complete steps are written.

    Cancellation: as on Ctrl-C; complete steps are written.
    """
    setup.seed_globals(config.train.seed)
    n_steps = setup.n_rollout_steps(config, data.rows)
    cpu = ThreadCpuPool(setup.n_cores())
    scorer = setup.make_scorer(config, cpu)
    codec = setup.load_codec(config, checkpoint)
    evidence = Evidence.open(config, run_dir, cpu, 0)
    n_done = 0
    async with servers.open_run_engine(
        config, checkpoint, codec, WeightVersion("0"), cpu=cpu, run_dir=run_dir, stop=stop
    ) as engine:
        work = Work(
            shared=engine.shared,
            config=config.rollout,
            limits=setup.train_limits(config, engine.shared.backend.max_context_len),
            rows=setup.make_rows(config, data.rows, None),
            scorer=scorer,
            assigns_credit=False,
            heartbeat_s=config.output.stall_warning,
            n_steps=n_steps,
        )
        emit("run.started", steps=n_steps, first_step=0, rows=len(data.rows), run_dir=str(run_dir))
        tell_operator(engine)
        with stop.work():
            async with work.open():
                for rollout_id in range(n_steps):
                    result = await work.run_step(rollout_id, may_pause=True)
                    await evidence.dump(result)
                    evidence.step(result, {}, {"perf/rollout_time": result.seconds})
                    n_done = rollout_id + 1
                    collect_garbage()
    return RunSummary(run_dir=run_dir, n_steps=n_done, stopped_by=stop.stopped_by, checkpoint=None)
