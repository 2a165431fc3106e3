"""The trainer of one process: `Updater` in a worker thread, its weights published after each phase."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path

import trio
from attrs import define, evolve, field

from relax_trio.backend.base import WeightSource
from relax_trio.data.json import JsonObject
from relax_trio.data.sample import Sample
from relax_trio.errors import TrainError, boundary
from relax_trio.events import emit
from relax_trio.ids import WeightVersion
from relax_trio.sync.cleanup import MAX_CLEANUP_S, cleanup_scope
from relax_trio.sync.cpu import CpuPool, ThreadCpuPool
from relax_trio.train.base import Trainer, version_of
from relax_trio.train.opening import open_updater
from relax_trio.train.phase import OpenPhase, run_phase
from relax_trio.train.pretrained import checkpoint_names
from relax_trio.train.resume import read_companions, save_updater
from relax_trio.train.settings import TrainerSettings
from relax_trio.train.stats import PhaseResult
from relax_trio.train.update import Updater

__all__ = ["TorchTrainer", "Trainer", "open_trainer"]


class TorchTrainer:
    """`Trainer` over torch, with a float32 model of its own.

    All torch work runs through one pool of one thread, so that a save never meets a half-done optimizer step.
    Make it with `open_trainer`.
    """

    def __init__(self, updater: Updater, companions: Mapping[str, bytes], pool: CpuPool) -> None:
        """Take over a loaded model; blocking work goes through `pool`.

        Args:
          updater: the model and its optimizer; nobody else may use them.
          companions: tokenizer and other files that every checkpoint gets, see `resume.read_companions`.
          pool: where the work runs; at most one call at a time.
        """
        self._updater = updater
        self._companions = companions
        self._pool = pool

    @property
    def weight_version(self) -> WeightVersion:
        """See `Trainer.weight_version`."""
        return version_of(self._updater.n_phases)

    async def step(self, rollout_id: int, samples: Sequence[Sample]) -> dict[str, float]:
        """See `Trainer.step`.

        Cancellation: asked for between micro-batches, so that it waits for one of them (forward and backward) and, if
        it was the last, for the AdamW step. A phase given up is undone; one that has ended returns its metrics.
        """
        with _failure_of(rollout_id):
            result = await self._pool.run(run_phase, self._updater, samples, _check_cancelled)
        return _tell(rollout_id, result)

    @asynccontextmanager
    async def phase(self, rollout_id: int) -> AsyncIterator[TorchPhase]:
        """See `Trainer.phase`. The worker thread is free between the batches; a save is refused until the end.

        Cancellation: while a batch is consumed as in `step`; while the phase ends, waits for the AdamW step; else at
        once. Undoing is shielded and takes a copy of weights and optimizer state, if an optimizer step was made.
        """
        opened = OpenPhase(self._updater)
        phase = TorchPhase(rollout_id, opened, self._pool)
        try:
            yield phase
            assert phase.is_whole, "a phase whose consume was cancelled or failed has to be left by that exception"
            with _failure_of(rollout_id):
                result = await self._pool.run(opened.finish)
        except BaseException:  # a cancellation, too: whatever leaves a phase early, it is undone
            with (
                cleanup_scope(MAX_CLEANUP_S, f"optimizer phase of rollout step {rollout_id}"),
                boundary(TrainError, f"training on rollout step {rollout_id} could not be undone", RuntimeError),
            ):
                await self._pool.run(opened.give_up)
            raise
        phase.result = _tell(rollout_id, result)

    def weights(self) -> WeightSource:
        """See `Trainer.weights`. The same copy until the next phase ends."""
        source = self._updater.weights
        assert source.tensors is not None, "a snapshot has tensors"
        named = checkpoint_names(self._updater.policy.model, source.tensors)
        return source if named is source.tensors else evolve(source, tensors=named)

    async def save(self, directory: Path, state: JsonObject) -> Path:
        """See `Trainer.save`. Cancellation: once begun, waits for the writing (seconds per GB of weights)."""
        path = await self._pool.run(save_updater, self._updater, self._companions, directory, state)
        emit("checkpoint.saved", version=self.weight_version, path=str(path))
        return path


@define(eq=False)
class TorchPhase:
    """`Phase` of a `TorchTrainer`.

    Attributes:
      is_whole: every call so far has ended in order.
      result: metrics, once the block was left in order.
    """

    _rollout_id: int
    _opened: OpenPhase
    _pool: CpuPool
    is_whole: bool = field(default=True, init=False)
    result: dict[str, float] | None = field(default=None, init=False)

    async def consume(self, samples: Sequence[Sample]) -> None:
        """See `Phase.consume`. The contexts of a Session may be in any place of a batch, but in one batch only."""
        assert self.is_whole, "a phase whose consume was cancelled or failed takes no rows"
        self.is_whole = False
        with _failure_of(self._rollout_id):
            await self._pool.run(self._opened.consume, samples, _check_cancelled)
        self.is_whole = True

    @property
    def metrics(self) -> dict[str, float]:
        """See `Phase.metrics`; for what the gap to rollout is of, see `stats.GAP_METRICS`."""
        assert self.result is not None, "metrics of a phase that has not ended in order"
        return self.result


async def open_trainer(
    settings: TrainerSettings, hf_checkpoint: Path, *, resume: Path | None = None, pool: CpuPool | None = None
) -> TorchTrainer:
    """Load the model and make its trainer.

    Args:
      settings: loss, optimizer, distribution, device.
      hf_checkpoint: weights and tokenizer to begin from; the reference's weights too, unless `--ref-load` names others.
      resume: one of our checkpoints (see `find_latest`) to go on from instead: weights, optimizer, counters, RNG.
      pool: where the work runs; default: one thread under a limiter of its own.

    Raises:
      ConfigError: a checkpoint that is no checkpoint, damaged, or of another model.

    Cancellation: waits until the model is loaded, then drops it.
    """
    pool = pool or ThreadCpuPool(1)
    return await pool.run(_open, settings, hf_checkpoint, resume, pool)


def _open(settings: TrainerSettings, hf_checkpoint: Path, resume: Path | None, pool: CpuPool) -> TorchTrainer:
    updater = open_updater(settings, hf_checkpoint, resume)
    return TorchTrainer(updater, read_companions(resume or hf_checkpoint), pool)


def _failure_of(rollout_id: int) -> AbstractContextManager[None]:
    """What torch raises for want of memory, or over rows no check foresaw, becomes a TrainError."""
    return boundary(TrainError, f"training on rollout step {rollout_id} failed", RuntimeError, IndexError)


def _tell(rollout_id: int, result: PhaseResult) -> dict[str, float]:
    """The metrics of a completed phase; its skipped optimizer steps are told as events."""
    for optimizer_step in result.skipped:
        emit("optimizer_step.skipped", rollout=rollout_id, step=optimizer_step, reason="gradient is not finite")
    return result.metrics


def _check_cancelled() -> None:
    """Raise Cancelled in a worker thread whose task is cancelled. In place of a thread there is nothing to ask."""
    try:
        trio.from_thread.check_cancelled()
    except RuntimeError:
        return
