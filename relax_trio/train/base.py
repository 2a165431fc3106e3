"""What a trainer offers the rollout loop. Knows Samples and weights: no Sessions, no HTTP, no torch import."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from relax_trio.backend.base import WeightSource
from relax_trio.data.json import JsonObject
from relax_trio.data.sample import Sample
from relax_trio.ids import WeightVersion


def version_of(n_phases: int) -> WeightVersion:
    """Name of the weights after `n_phases` optimizer phases: "0" are the checkpoint's own."""
    return WeightVersion(str(n_phases))


class Phase(Protocol):
    """An optimizer phase that takes its rows as they come; the block it lives in is the phase."""

    async def consume(self, samples: Sequence[Sample]) -> None:
        """Train on some rows of the step.

        Gradients add up until `--global-batch-size` Sessions were consumed (with one context a Session, as many rows);
        then the optimizer makes a step. Cut into any batches, the same rows in the same order give the same optimizer
        steps, up to rounding.

        Args:
          samples: rows, each with its `advantage`; all contexts of a Session in one call.

        Raises:
          TrainError: the rows cannot be trained on, or the training failed; the phase has to be left.

        Cancellation: as `Trainer.step`; the phase has to be left.
        """
        ...

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics as `Trainer.step` returns them; only after the block was left in order.

        The gap to rollout is taken under the weights that a row met when it was consumed.
        """
        ...


class Trainer(Protocol):
    """Owns the trained weights. One task calls it; its methods never overlap.

    An optimizer phase is the training on one rollout step: one or more optimizer steps, counted as one.
    """

    @property
    def weight_version(self) -> WeightVersion:
        """Name of the weights that `weights()` gives: the number of completed optimizer phases, from "0"."""
        ...

    async def step(self, rollout_id: int, samples: Sequence[Sample]) -> dict[str, float]:
        """Run the optimizer phase of rollout step `rollout_id`.

        Args:
          rollout_id: number of the rollout step, for messages and events.
          samples: every row of the step, each with its `advantage`; all contexts of a Session among them.

        Returns:
          Metrics by their slash-separated names: at least `train/loss`, `train/grad_norm`, `train/lr`,
          `train/entropy`, `train/ppo_kl`, `train/pg_clipfrac`, `train/rollout_logprob_abs_diff`, `train/n_tokens`.
          All are finite but `train/rollout_logprob_abs_diff`, its mean and `train/rollout_kl`, which are infinite
          where a recomputed logprob isn't a number. Means of nothing, when every optimizer step was skipped, are 0.0.

        Raises:
          TrainError: the rows cannot be trained on, or the training failed; the trainer is as before the phase.

        Cancellation: the weights are those from before the phase or those after it, never between: `weight_version`
        says which.
        """
        ...

    def phase(self, rollout_id: int) -> AbstractAsyncContextManager[Phase]:
        """Open the optimizer phase of rollout step `rollout_id`, for rows that come while rollout goes on.

        Leaving the block in order makes the last optimizer step, if rows are left for one, and counts the phase.
        Leaving it by an exception undoes the whole phase. While the block is open the trainer is not saved.

        Raises (on leaving):
          TrainError: no row had a trained token, or the last step failed; the trainer is as before the phase.

        Cancellation: the phase is undone, or has ended; `weight_version` says which.
        """
        ...

    def weights(self) -> WeightSource:
        """The weights of `weight_version`; later phases don't change what was returned. Never checkpoints."""
        ...

    async def save(self, directory: Path, state: JsonObject) -> Path:
        """Write a resumable checkpoint as `directory/step_NNNNNN` (N: completed phases) and return its path.

        Args:
          directory: where the checkpoints of the run are; made if missing.
          state: what the caller needs to resume (rollout id, data position, seeds, …).

        Raises:
          TrainError: it could not be written; earlier checkpoints are untouched.

        Cancellation: before the writing starts nothing is written; after that it is finished first.
        """
        ...
