"""Corrections for tokens that the trained policy would not have sampled so: weights and masks without gradient.

Two gaps are told apart. Between engine and trainer, which compute different logprobs of the same weights: truncated and
masked importance sampling. Between the weights that sampled and those that are trained: off-policy sequence masking,
which looks at both at once. Pure functions on flat tensors of trained tokens.
"""

from __future__ import annotations

import torch

from relax_trio.train.loss import bounded_exp


def importance_ratios(old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> torch.Tensor:
    """rho_t = exp(old_t - rollout_t): the trainer's over the engine's probability of a token, (K,), detached."""
    return bounded_exp(old_logprobs.detach() - rollout_logprobs)


def truncated_weights(ratios: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    """Truncated importance sampling: w_t = min(max(rho_t, low), high).

    Source: Ionides 2008, "Truncated importance sampling"; for the gap between engine and trainer: Yao et al. 2025
    (fengyao.notion.site/off-policy-rl); the lower bound is slime's `--tis-clip-low`.
    """
    return ratios.clamp(low, high)


def masked_weights(ratios: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    """Masked importance sampling: w_t = rho_t where low <= rho_t <= high, else 0.

    Source: IcePop, section 2.3.2 of Ring-1T (Ling team 2025, arXiv:2510.18855).
    """
    return torch.where((ratios >= low) & (ratios <= high), ratios, torch.zeros_like(ratios))


def kept_by_sequence(divergence: torch.Tensor, advantages: torch.Tensor, *, delta: float) -> torch.Tensor:
    """Off-policy sequence masking: leave out bad sequences that the policy has moved away from.

        M_t = 0  where  A_t < 0  and  mean over the sequence of (rollout_t - logp_t) > delta,  else 1

    Source: DeepSeek-V3.2 (arXiv:2512.02556), eq. 9. The old logprobs are the engine's, so that both gaps count.
    A sequence is a Session, see sequences.py.

    Args:
      divergence: (K,) that mean, of the sequence of each token.
      advantages: (K,).

    Returns:
      (K,) bool, False where the token is left out.
    """
    return ~((advantages < 0) & (divergence > delta))
