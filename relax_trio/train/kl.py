"""How far a policy is from another one, estimated from tokens that one of them sampled: pure functions of logprobs."""

from __future__ import annotations

import torch

from relax_trio.train.loss import bounded_exp

LOW_VAR_BOUND = 10.0
"""Bound of a token's `low_var_kl`, as in slime and Relax: one token far off does not carry the whole loss."""


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate KL(policy || reference) at each token that the policy sampled.

    With d = logp_t - ref_t:

        k1 = d                          unbiased, may be negative
        k2 = d^2 / 2                    its gradient is that of the KL; itself biased
        k3 = exp(-d) - 1 + d            unbiased, never negative, of low variance
        low_var_kl = min(k3, 10)

    Source: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html); k3 as a loss is that of GRPO
    (Shao et al. 2024, arXiv:2402.03300, eq. 4); the bound is slime's. |d| is kept below `loss.MAX_LOG_RATIO` in exp.

    Args:
      logprobs: (K,) of the policy; differentiable where the estimate is a loss.
      ref_logprobs: (K,) of the reference.
      kind: one of the names above.

    Returns:
      (K,) nats.
    """
    d = logprobs - ref_logprobs
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2.0
    assert kind in ("k3", "low_var_kl"), f"no estimator of the KL divergence is named {kind}"
    k3 = bounded_exp(-d) - 1.0 + d
    return k3 if kind == "k3" else k3.clamp(max=LOW_VAR_BOUND)


def unbiased(kl: torch.Tensor, log_ratios: torch.Tensor) -> torch.Tensor:
    """Make an estimate over tokens of the old policy one over tokens of the policy: KL_t * pi_t / pi_old_t.

    Its gradient is then that of the KL, however far the policy has moved.

    Source: DeepSeek-V3.2 (arXiv:2512.02556), eq. 7; slime's `--use-unbiased-kl`.

    Args:
      kl: (K,) from `kl_estimate`.
      log_ratios: (K,) new minus old logprob; differentiable.
    """
    return kl * bounded_exp(log_ratios)
