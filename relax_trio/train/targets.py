"""What the loss of a micro-batch is made of apart from the policy that is trained: flat tensors of its trained tokens.

Owns the order of the steps between credit and loss: reference, shaped returns, whitening. Pure; the forward passes
whose logprobs are needed are the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define

from relax_trio.train.advantage import Moments, return_kl, whitened
from relax_trio.train.kl import kl_estimate
from relax_trio.train.packing import Batch
from relax_trio.train.sequences import Sequences, make_sequences
from relax_trio.train.settings import TrainerSettings


@define(eq=False, kw_only=True)
class Targets:
    """The K trained tokens of one micro-batch, in row-major order of its mask; float64 on the CPU.

    Attributes:
      batch: the micro-batch.
      rollout: (K,) logprobs as recorded.
      advantages: (K,), shaped and whitened where the settings say so.
      weights: (K,) in the undivided loss, see `packing.row_weights`.
      sequences: the Sessions of the tokens.
      old: (K,) logprobs of the old policy; None: those of the policy itself, whose weights haven't changed since.
      ref: (K,) logprobs of the reference; None without one.
    """

    batch: Batch
    rollout: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    sequences: Sequences
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
      batches: all micro-batches of the optimizer batch, where advantages are whitened; else of any of its Sessions.
      settings: estimator, old policy, KL, whitening.
      own: (K,) logprobs of the policy under the weights that the rows met, for each micro-batch. Needed where those
        weights will have changed, or where returns are shaped by the KL of a recomputed old policy.
      ref: (K,) logprobs of the reference, for each micro-batch.
    """
    targets = [_flat(batch, sequences) for batch, sequences in zip(batches, make_sequences(batches), strict=True)]
    for position, target in enumerate(targets):
        if settings.train.takes_rollout_logprobs:
            target.old = target.rollout
        elif own is not None:
            target.old = own[position].double().cpu()
        if ref is not None:
            target.ref = ref[position].double().cpu()
    if settings.train.kl_coef:
        _shape(targets, settings)
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


def _flat(batch: Batch, sequences: Sequences) -> Targets:
    mask = batch.loss_mask
    return Targets(
        batch=batch,
        rollout=batch.rollout_logprobs[mask],
        advantages=batch.advantages[mask],
        weights=batch.weights[mask],
        sequences=sequences,
    )


def _shape(targets: Sequence[Targets], settings: TrainerSettings) -> None:
    """Take the KL to the reference from the advantages, row by row in the order that the rows were handed over in."""
    of_row: dict[int, tuple[int, torch.Tensor]] = {}
    for target in targets:
        assert target.old is not None, "the KL in returns is that of the old policy"
        assert target.ref is not None, "the KL in returns is to the reference"
        kl = kl_estimate(target.old, target.ref, settings.train.kl_estimator)
        parts = torch.split(kl, _tokens_of_rows(target.batch))
        of_row.update(zip(target.batch.rows, zip(target.batch.sessions, parts, strict=True), strict=True))
    rows = sorted(of_row)
    kl_of_row = return_kl([of_row[row][1] for row in rows], [of_row[row][0] for row in rows], settings.estimator)
    taken = dict(zip(rows, kl_of_row, strict=True))
    for target in targets:
        whole = torch.cat([target.advantages[:0], *(taken[row] for row in target.batch.rows)])
        target.advantages = target.advantages - settings.train.kl_coef * whole


def _tokens_of_rows(batch: Batch) -> list[int]:
    """Trained tokens of each row of a micro-batch."""
    return torch.bincount(batch.token_rows, minlength=len(batch.rows)).tolist()
