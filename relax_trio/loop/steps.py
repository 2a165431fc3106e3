"""The training loop: rollout, optimizer phase, new weights, evaluation, checkpoint; step after step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import trio
from attrs import define, field

from relax_trio.config.tree import Config
from relax_trio.data.json import JsonObject
from relax_trio.errors import TrainError
from relax_trio.events import emit
from relax_trio.ids import WeightVersion
from relax_trio.loop import setup
from relax_trio.loop.evidence import Evidence
from relax_trio.loop.start import collect_garbage
from relax_trio.runtime.evaluate import EvalDataset, Evaluation
from relax_trio.runtime.ledger import Partition
from relax_trio.runtime.shared import Shared, TurnLimits
from relax_trio.runtime.step import StepResult
from relax_trio.runtime.work import Work
from relax_trio.sync.cleanup import MAX_CLEANUP_S, cleanup_scope
from relax_trio.train.base import Trainer


@define(eq=False, kw_only=True)
class TrainLoop:
    """One training run over an open work.

    Attributes:
      n_steps: steps of the whole run.
      states: what a checkpoint of each weight version must remember; at most two are kept.
      lend_memory: opens a block in which the engine's GPU memory is the trainer's.
      update_s: seconds of handing over the weights that the coming step runs on.
      save_s: seconds of writing their checkpoint; None where there was none.
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
    lend_memory: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    states: dict[WeightVersion, JsonObject] = field(factory=dict)
    saved: WeightVersion | None = None
    checkpoint: Path | None = None
    update_s: float = 0.0
    save_s: float | None = None

    async def run(self) -> None:
        """Run the steps that are left.

        Raises:
          RelaxTrioError: rollout, reward, training or the hand-over of weights failed.

        Cancellation: the step in hand is given up; an optimizer phase is undone or finished, never left between.
        """
        self.saved = self.trainer.weight_version
        await self.evaluate_if_due(self.first_step)
        for rollout_id in range(self.first_step, self.n_steps):
            await self._run_step(rollout_id)
            await self.after_step(rollout_id + 1)

    async def save(self) -> None:
        """Write a checkpoint of the last complete step, unless it is written already."""
        version = self.trainer.weight_version
        if version != self.saved:
            started_s = trio.current_time()
            self.checkpoint = await self.trainer.save(self.save_dir, self.states[version])
            self.saved = version
            self.save_s = trio.current_time() - started_s

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
        # What is paused would go on with what an evaluation generates.
        result = await self.work.run_step(rollout_id, may_pause=not self._due_datasets(rollout_id + 1))
        await self.evidence.dump(result)
        self.remember(rollout_id + 1)
        async with self.lend_memory():
            await self._train_step(rollout_id, result)

    async def _train_step(self, rollout_id: int, result: StepResult) -> None:
        """The optimizer phase, and the hand-over of its weights, with which the engine has its memory again."""
        started_s = trio.current_time()
        train_metrics = await self.trainer.step(rollout_id, result.samples)
        train_s = trio.current_time() - started_s
        # Without a checkpoint in between: a step that is trained is written down, whatever stops the run now.
        times = {
            "perf/rollout_time": result.seconds,
            "perf/train_time": train_s,
            "perf/step_time": result.seconds + train_s,
            **self.times_before,
        }
        self.evidence.step(result, train_metrics, times)
        self.save_s, started_s = None, trio.current_time()
        await self.shared.backend.update_weights(self.trainer.weight_version, self.trainer.weights())
        self.update_s = trio.current_time() - started_s

    @property
    def times_before(self) -> dict[str, float]:
        """What lay between the step before and this one, in seconds."""
        saved = {} if self.save_s is None else {"perf/save_time": self.save_s}
        return {"perf/update_weights_time": self.update_s, **saved}

    def remember(self, n_done: int, trained: Partition | None = None) -> None:
        """Note what the checkpoint of the coming version needs, before the phase that makes it has ended."""
        current = self.trainer.weight_version
        version = WeightVersion(str(n_done))
        state = setup.resume_state(self.work, n_done, version, self.evidence.run_dir, trained=trained)
        self.states = {v: s for v, s in self.states.items() if v == current} | {version: state}

    async def after_step(self, n_done: int) -> None:
        """Save and evaluate, where `n_done` complete steps call for it."""
        collect_garbage()
        if self.config.train.save_interval and n_done % self.config.train.save_interval == 0:
            await self.save()
        await self.evaluate_if_due(n_done)

    async def evaluate_if_due(self, n_done: int) -> None:
        """Evaluate before the first step, at the interval and at the end, unless a resumed run has done it."""
        for dataset in self._due_datasets(n_done):
            evaluation = Evaluation(
                dataset=dataset,
                shared=self.shared,
                limits=self.eval_limits,
                scorer=self.work.scorer,
                session_retries=self.config.rollout.agentic_session_retries,
                agent_retries=self.config.rollout.agentic_agent_retries,
                heartbeat_s=self.config.output.stall_warning,
            )
            self.evidence.evaluation(n_done, await evaluation.run())

    def _due_datasets(self, n_done: int) -> list[EvalDataset]:
        """What is to be evaluated after `n_done` steps."""
        interval = self.config.eval.eval_interval
        if interval is None or (n_done % interval and n_done != self.n_steps):
            return []
        return [dataset for dataset in self.datasets if not self.evidence.has_evaluation(n_done, dataset.name)]
