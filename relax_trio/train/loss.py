"""The policy-gradient loss: pure functions on flat tensors of trained tokens.

The algorithm is the clipped surrogate of PPO with GRPO's critic-free advantage. What is left out: a value function, a
second forward pass for "old" logprobs (those recorded at rollout are the old policy), KL terms, entropy bonus,
whitening.
"""

from __future__ import annotations

import torch
from attrs import frozen

MAX_LOG_RATIO = 20.0
"""Bound on |log ratio| before exp: beyond it float32 would overflow and poison the whole batch through 0 * inf."""


@frozen(kw_only=True, eq=False)
class PolicyLoss:
    """Loss of K trained tokens and what there is to say about them.

    Attributes:
      loss: () differentiable; the sum over tokens of weight times token loss.
      ratio: (K,) detached, new over old probability.
      clipped: (K,) bool, where the clipped branch is the larger loss: no gradient flows there.
      log_ratio: (K,) detached, new minus old logprob, unbounded.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    log_ratio: torch.Tensor


def clipped_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    eps_low: float,
    eps_high: float,
) -> PolicyLoss:
    """PPO's clipped surrogate with separate lower and upper bound.

    L = sum_t w_t * max(-A_t * r_t, -A_t * clip(r_t, 1 - eps_low, 1 + eps_high)),  r_t = exp(logp_t - old_t)

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7, as a loss to be minimized; the upper bound of its own is
    "clip-higher" of DAPO (Yu et al. 2025, arXiv:2503.14476), eq. 10.

    Args:
      logprobs: (K,) float, of the policy being trained; differentiable.
      old_logprobs: (K,) float, recorded at rollout.
      advantages: (K,) float.
      weights: (K,) float, see `packing.row_weights`. The normalizer is not among them: it divides the sum over all
        micro-batches of the optimizer step, when the last of them is there.
      eps_low, eps_high: clip range of the ratio below and above 1.
    """
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    loss = (weights * torch.maximum(plain, bounded)).sum()
    return PolicyLoss(loss=loss, ratio=ratio.detach(), clipped=(bounded > plain).detach(), log_ratio=log_ratio.detach())


def kl_sum(log_ratio: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Estimate KL(old || new) from tokens that the old policy sampled: sum_t w_t * (old_t - new_t), undivided.

    Source: estimator k1 of Schulman 2020 ("Approximating KL divergence", joschu.net). Unbiased, may be negative.

    Args:
      log_ratio: (K,) new minus old logprob.
      weights: (K,) as of the loss, see `clipped_policy_loss`.
    """
    return -(weights * log_ratio).sum()
