"""The trainer of one process: `Updater` in a worker thread, its weights published after each phase."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import trio

from relax_trio.backend.base import WeightSource
from relax_trio.data.json import JsonObject
from relax_trio.data.sample import Sample
from relax_trio.errors import TrainError, boundary
from relax_trio.events import emit
from relax_trio.ids import WeightVersion
from relax_trio.sync.cpu import CpuPool, ThreadCpuPool
from relax_trio.train.base import Trainer, version_of
from relax_trio.train.checkpoint import write_checkpoint
from relax_trio.train.policy import Policy
from relax_trio.train.pretrained import load_model
from relax_trio.train.resume import read_companions, restore, write_payload
from relax_trio.train.settings import TrainerSettings
from relax_trio.train.update import GAP_METRICS, PhaseResult, Updater

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
        with boundary(TrainError, f"training on rollout step {rollout_id} failed", RuntimeError, IndexError):
            result = await self._pool.run(self._run_phase, samples)
        for optimizer_step in result.skipped:
            emit("optimizer_step.skipped", rollout=rollout_id, step=optimizer_step, reason="gradient is not finite")
        return result.metrics

    def weights(self) -> WeightSource:
        """See `Trainer.weights`. The same copy until the next phase ends."""
        return self._updater.weights

    async def save(self, directory: Path, state: JsonObject) -> Path:
        """See `Trainer.save`. Cancellation: once begun, waits for the writing (seconds per GB of weights)."""
        payload = partial(write_payload, updater=self._updater, companions=self._companions)
        path = await self._pool.run(write_checkpoint, directory, self._updater.n_phases, payload, state)
        emit("checkpoint.saved", version=self.weight_version, path=str(path))
        return path

    def _run_phase(self, samples: Sequence[Sample]) -> PhaseResult:
        result = self._updater.run_phase(samples, _check_cancelled)
        odd = {name for name, value in result.metrics.items() if not math.isfinite(value)}
        assert odd <= set(GAP_METRICS), f"{odd} are not finite"
        return result


async def open_trainer(
    settings: TrainerSettings, hf_checkpoint: Path, *, resume: Path | None = None, pool: CpuPool | None = None
) -> TorchTrainer:
    """Load the model and make its trainer.

    Args:
      settings: loss, optimizer, distribution, device.
      hf_checkpoint: weights and tokenizer to begin from.
      resume: one of our checkpoints (see `find_latest`) to go on from instead: weights, optimizer, counters, RNG.
      pool: where the work runs; default: one thread under a limiter of its own.

    Raises:
      ConfigError: a checkpoint that is no checkpoint, damaged, or of another model.

    Cancellation: waits until the model is loaded, then drops it.
    """
    pool = pool or ThreadCpuPool(1)
    return await pool.run(_open, settings, hf_checkpoint if resume is None else resume, resume, pool)


def _open(settings: TrainerSettings, source: Path, resume: Path | None, pool: CpuPool) -> TorchTrainer:
    updater = Updater(Policy(load_model(source, settings.device)), settings)
    if resume is not None:
        restore(updater, resume)
    return TorchTrainer(updater, read_companions(source), pool)


def _check_cancelled() -> None:
    """Raise Cancelled in a worker thread whose task is cancelled. In place of a thread there is nothing to ask."""
    try:
        trio.from_thread.check_cancelled()
    except RuntimeError:
        return
