"""The loss of one micro-batch: the policy loss of its tokens, corrected, with entropy and KL, summed by weight.

    loss = sum_t w_t * (c_t m_t L_t - entropy_coef * H_t + kl_loss_coef * KL_t)

L: the estimator's policy loss (loss.py), c: the correction for the gap between engine and trainer, m: the mask of
off-policy sequences (both importance.py), KL: to the reference (kl.py), w: packing.row_weights. The sum is divided when
the optimizer batch is complete. Masked tokens keep their weight in what it is divided by.
"""

from __future__ import annotations

import torch
from attrs import frozen

from relax_trio.train.importance import importance_ratios, kept_by_sequence, masked_weights, truncated_weights
from relax_trio.train.kl import kl_estimate, unbiased
from relax_trio.train.loss import (
    TokenLosses,
    clipped_losses,
    kl_sum,
    sequence_log_ratios,
    truncated_policy_losses,
)
from relax_trio.train.sequences import Sequences
from relax_trio.train.settings import TrainerSettings
from relax_trio.train.targets import Targets


@frozen(kw_only=True, eq=False)
class Objective:
    """Loss of K trained tokens and what there is to say about them.

    Attributes:
      loss: () differentiable, undivided.
      sums: metric name → () weighted sum, detached.
      gap: (K,) detached, logprobs of the policy minus those recorded at rollout.
      ratios: (K,) detached, new over old probability.
    """

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    gap: torch.Tensor
    ratios: torch.Tensor


def objective(logprobs: torch.Tensor, entropy: torch.Tensor, targets: Targets, settings: TrainerSettings) -> Objective:
    """Compute the loss of one micro-batch, see the module's formula.

    Args:
      logprobs: (K,) of the policy being trained; differentiable.
      entropy: (K,) of its distributions; differentiable where the entropy is part of the loss.
      targets: what the loss is made of besides; brought to type and device of `logprobs`.
      settings: estimator, clips, coefficients.
    """
    train = settings.train
    weights, advantages, rollout = (t.to(logprobs) for t in (targets.weights, targets.advantages, targets.rollout))
    old = logprobs.detach() if targets.old is None else targets.old.to(logprobs)
    token = policy_losses(logprobs, old, advantages, targets.sequences, settings)
    losses = token.losses
    sums = {
        "train/entropy": (weights * entropy.detach()).sum(),
        "train/ppo_kl": kl_sum((logprobs - old).detach(), weights),
        "train/pg_clipfrac": (weights * (token.low | token.high | token.dual)).sum(),
        "train/pg_clipfrac_low": (weights * token.low).sum(),
        "train/pg_clipfrac_high": (weights * token.high).sum(),
        "train/ratio": (weights * token.ratios).sum(),
    }
    if train.eps_clip_c is not None:
        sums["train/pg_clipfrac_dual"] = (weights * token.dual).sum()
    kept = torch.ones_like(weights, dtype=torch.bool)
    if train.corrects_gap:
        corrections, kept = _gap_corrections(importance_ratios(old, rollout), weights, sums, settings)
        losses = losses * corrections
    if train.use_opsm:
        sequences = targets.sequences
        divergence = -sequences.means(logprobs - rollout, sequences.away_drift)
        passed = kept_by_sequence(divergence, advantages, delta=train.opsm_delta)
        sums["train/opsm_clipfrac"] = (weights * ~passed).sum()
        losses = losses * passed
        kept = kept & passed
    if train.use_mis or train.use_opsm:
        sums["train/masked_frac"] = (weights * ~kept).sum()
    loss = (weights * losses).sum()
    sums["train/pg_loss"] = loss.detach()
    if train.entropy_coef:
        loss = loss - train.entropy_coef * (weights * entropy).sum()
    if train.use_kl_loss:
        assert targets.ref is not None, "a KL loss needs the reference's logprobs"
        kl = kl_estimate(logprobs, targets.ref.to(logprobs), train.kl_estimator)
        if train.use_unbiased_kl:
            kl = unbiased(kl, logprobs - old)
        sums["train/kl_loss"] = (weights * kl.detach()).sum()
        if train.kl_loss_coef:  # with 0 it is measured only; 0 * inf would be no number
            loss = loss + train.kl_loss_coef * (weights * kl).sum()
    elif targets.ref is not None:
        sums["train/ref_kl"] = (weights * kl_estimate(old, targets.ref.to(old), train.kl_estimator)).sum()
    sums["train/loss"] = loss.detach()
    return Objective(loss=loss, sums=sums, gap=(logprobs - rollout).detach(), ratios=token.ratios)


def policy_losses(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    sequences: Sequences,
    settings: TrainerSettings,
) -> TokenLosses:
    """The policy loss of each token by `--advantage-estimator`: CISPO's, GSPO's, or PPO's clip for all others."""
    train = settings.train
    log_ratios = logprobs - old
    if settings.estimator == "cispo":
        return truncated_policy_losses(
            logprobs, log_ratios, advantages, eps_low=train.eps_clip, eps_high=train.upper_clip
        )
    if settings.estimator == "gspo":
        log_ratios = sequence_log_ratios(log_ratios, sequences.means(log_ratios, sequences.away_ratio))
    return clipped_losses(
        log_ratios, advantages, eps_low=train.eps_clip, eps_high=train.upper_clip, dual_bound=train.eps_clip_c
    )


def _gap_corrections(
    ratios: torch.Tensor, weights: torch.Tensor, sums: dict[str, torch.Tensor], settings: TrainerSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """(K,) weights for the gap between engine and trainer, (K,) bool which tokens they keep; adds the metrics."""
    train = settings.train
    correct = truncated_weights if train.use_tis else masked_weights
    corrections = correct(ratios, low=train.tis_clip_low, high=train.tis_clip)
    sums["train/tis"] = (weights * ratios).sum()
    sums["train/tis_abs"] = (weights * (ratios - 1.0).abs()).sum()
    sums["train/tis_weight"] = (weights * corrections).sum()
    sums["train/tis_clipfrac"] = (weights * (corrections != ratios)).sum()
    return corrections, corrections != 0.0
