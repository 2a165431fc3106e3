"""The policy-gradient losses of tokens: pure functions on flat tensors of trained tokens.

Each gives the loss of every token, to be minimized; which of them a run uses, and what is added, is objective.py's.
How tokens are weighed into one number is packing.py's. Left out: a value function.
"""

from __future__ import annotations

import torch
from attrs import frozen

MAX_LOG_RATIO = 20.0
"""Bound on |log ratio| before exp: beyond it float32 would overflow and poison the whole batch through 0 * inf."""


@frozen(kw_only=True, eq=False)
class TokenLosses:
    """Losses of K tokens.

    Attributes:
      losses: (K,) differentiable.
      ratios: (K,) detached, new over old probability; the sequence's where the loss is of sequences.
      low, high: (K,) bool, where the lower or the upper bound of the ratio holds.
      dual: (K,) bool, where the bound of the dual clip holds.
    """

    losses: torch.Tensor
    ratios: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    dual: torch.Tensor


def bounded_exp(log_ratios: torch.Tensor) -> torch.Tensor:
    """exp, with the argument kept within `MAX_LOG_RATIO`; no gradient beyond."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_log_ratios(log_ratios: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """GSPO: the logarithm of the length-normalized ratio of a whole sequence, as the ratio of each of its tokens.

        s_i   = (pi(y_i) / pi_old(y_i)) ^ (1 / |y_i|) = exp(mean over the tokens t of y_i of (logp_t - old_t))
        s_i,t = stop(s_i) * pi(t) / stop(pi(t))

    `clipped_losses` of it is GSPO's loss in its token form: where all tokens of a sequence have one advantage, loss,
    clipping and gradient are those of the sequence form; where turns or contexts have credit of their own, each token
    is moved by its own, and one that a correction masks by none.

    Source: Zheng et al. 2025 (arXiv:2507.18071), eq. 5, 7, 13 and 14. A sequence is a Session, see sequences.py.

    Args:
      log_ratios: (K,) new minus old logprob; differentiable.
      means: (K,) their mean over the sequence of each token.
    """
    return means.detach() + (log_ratios - log_ratios.detach())


def clipped_losses(
    log_ratios: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_bound: float | None = None,
) -> TokenLosses:
    """PPO's clipped surrogate with separate lower and upper bound, and the dual clip.

        r_t = exp(logp_t - old_t)
        L_t = max(-A_t r_t, -A_t clip(r_t, 1 - eps_low, 1 + eps_high))
        with a dual bound c, where A_t < 0:  L_t = min(L_t, -c A_t)

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7, as a loss; the upper bound of its own is "clip-higher" of
    DAPO (Yu et al. 2025, arXiv:2503.14476), eq. 10; the dual clip is Ye et al. 2020 (arXiv:1912.09729), eq. 5.

    Args:
      log_ratios: (K,) new minus old logprob; differentiable.
      advantages: (K,).
      eps_low, eps_high: clip range of the ratio below and above 1.
      dual_bound: c > 1; None: no dual clip.
    """
    ratios = bounded_exp(log_ratios)
    plain = -advantages * ratios
    bounded = -advantages * ratios.clamp(1.0 - eps_low, 1.0 + eps_high)
    losses = torch.maximum(plain, bounded)
    clipped = (bounded > plain).detach()
    dual = torch.zeros_like(clipped)
    if dual_bound is not None:
        ceiling = -dual_bound * advantages
        dual = ((advantages < 0) & (ceiling < losses)).detach()
        losses = torch.where(dual, ceiling, losses)
    return TokenLosses(
        losses=losses,
        ratios=ratios.detach(),
        low=clipped & (advantages < 0),
        high=clipped & (advantages > 0),
        dual=dual,
    )


def truncated_policy_losses(
    logprobs: torch.Tensor, log_ratios: torch.Tensor, advantages: torch.Tensor, *, eps_low: float, eps_high: float
) -> TokenLosses:
    """CISPO: the clipped ratio is a weight without gradient, so that no token loses its gradient.

        L_t = -stop(clip(r_t, 1 - eps_low, 1 + eps_high)) A_t logp_t

    Source: MiniMax-M1 (arXiv:2506.13585), eq. 4 and 5. The paper leaves the lower side open: `eps_low` of 1 or more.

    Args:
      logprobs: (K,) of the policy being trained; differentiable.
      log_ratios: (K,) new minus old logprob; no gradient flows here.
      advantages: (K,).
      eps_low, eps_high: clip range of the ratio below and above 1.
    """
    ratios = bounded_exp(log_ratios.detach())
    coefficients = ratios.clamp(1.0 - eps_low, 1.0 + eps_high)
    return TokenLosses(
        losses=-coefficients * advantages * logprobs,
        ratios=ratios,
        low=ratios < 1.0 - eps_low,
        high=ratios > 1.0 + eps_high,
        dual=torch.zeros_like(ratios, dtype=torch.bool),
    )


def kl_sum(log_ratio: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Estimate KL(old || new) from tokens that the old policy sampled: sum_t w_t * (old_t - new_t), undivided.

    Source: estimator k1 of Schulman 2020 ("Approximating KL divergence", joschu.net). Unbiased, may be negative.

    Args:
      log_ratio: (K,) new minus old logprob.
      weights: (K,), see `packing.row_weights`.
    """
    return -(weights * log_ratio).sum()
