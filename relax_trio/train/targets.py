"""What the loss of a micro-batch is made of apart from the policy that is trained: flat tensors of its trained tokens.

Owns the order of the steps between credit and loss: reference, shaped returns, whitening. Pure; the forward passes
whose logprobs are needed are the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define

from relax_trio.train.advantage import Moments, shaped_advantages, whitened
from relax_trio.train.kl import kl_estimate
from relax_trio.train.packing import Batch
from relax_trio.train.settings import TrainerSettings


@define(eq=False, kw_only=True)
class Targets:
    """The K trained tokens of one micro-batch, in row-major order of its mask; float64 on the CPU.

    Attributes:
      batch: the micro-batch.
      rollout: (K,) logprobs as recorded.
      advantages: (K,), shaped and whitened where the settings say so.
      weights: (K,) in the undivided loss, see `packing.row_weights`.
      rows: (K,) int64, the row of each token, below `n_rows`.
      n_rows: rows of the micro-batch.
      old: (K,) logprobs of the old policy; None: those of the policy itself, whose weights haven't changed since.
      ref: (K,) logprobs of the reference; None without one.
    """

    batch: Batch
    rollout: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    rows: torch.Tensor
    n_rows: int
    old: torch.Tensor | None = None
    ref: torch.Tensor | None = None


def make_targets(
    batches: Sequence[Batch],
    settings: TrainerSettings,
    *,
    own: Sequence[torch.Tensor] | None = None,
    ref: Sequence[torch.Tensor] | None = None,
) -> list[Targets]:
    """Make the targets of one optimizer batch, in the order of its micro-batches.

    Args:
      batches: all micro-batches of the optimizer batch, where advantages are whitened; else any of them.
      settings: estimator, old policy, KL, whitening.
      own: (K,) logprobs of the policy under the weights that the rows met, for each micro-batch. Needed where those
        weights will have changed, or where returns are shaped by the KL of a recomputed old policy.
      ref: (K,) logprobs of the reference, for each micro-batch.
    """
    targets = [_flat(batch) for batch in batches]
    for position, target in enumerate(targets):
        if settings.train.takes_rollout_logprobs:
            target.old = target.rollout
        elif own is not None:
            target.old = own[position].double().cpu()
        if ref is not None:
            target.ref = ref[position].double().cpu()
        if settings.train.kl_coef:
            target.advantages = _shaped(target, settings)
    if settings.train.normalize_advantages:
        moments = advantage_moments(targets)
        for target in targets:
            target.advantages = whitened(target.advantages, moments)
    return targets


def advantage_moments(targets: Sequence[Targets]) -> Moments:
    """Of the advantages of all trained tokens."""
    moments = Moments()
    for target in targets:
        moments.join(Moments.of(target.advantages))
    return moments


def _flat(batch: Batch) -> Targets:
    mask = batch.loss_mask
    return Targets(
        batch=batch,
        rollout=batch.rollout_logprobs[mask],
        advantages=batch.advantages[mask],
        weights=batch.weights[mask],
        rows=batch.token_rows,
        n_rows=len(batch.rows),
    )


def _shaped(target: Targets, settings: TrainerSettings) -> torch.Tensor:
    assert target.old is not None, "the KL in returns is that of the old policy"
    assert target.ref is not None, "the KL in returns is to the reference"
    return shaped_advantages(
        target.advantages,
        kl_estimate(target.old, target.ref, settings.train.kl_estimator),
        target.rows,
        estimator=settings.estimator,
        kl_coef=settings.train.kl_coef,
    )
