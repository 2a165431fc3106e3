"""Credit: the base number that each row of a Group gets from the Group's rewards. Pure.

Not covered: advantages of tokens (train/advantage.py), rewards (reward.py), credit of several contexts (advantage.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from relax_trio.config.tree import RewardConfig
from relax_trio.data.sample import Sample
from relax_trio.errors import CreditError
from relax_trio.reward.value import primary_reward

STD_EPS = 1e-6
"""Added to the standard deviation, so that a Group of nearly equal rewards gets no enormous credit."""


def assign_credit(samples_of_group: Sequence[Sample], config: RewardConfig) -> None:
    """Set `advantage` on every row of one complete Group, as `--advantage-estimator` says.

    One logical Session, named by its place, counts as one reward.

    Raises:
      CreditError: a Session without reward, with a reward object that `--reward-key` doesn't open, or with several
        exported contexts: one outcome doesn't say what each of them deserves. No row is changed then.
    """
    assert len({sample.group for sample in samples_of_group}) <= 1, "credit is a matter of one Group"
    fanned_out = several_contexts(samples_of_group)
    if fanned_out is not None:
        raise CreditError(
            f"{fanned_out}, but one outcome does not say how much credit each of them deserves: say it by "
            "--agentic-custom-advantage-path, or export one context per Session"
        )
    rewards = [primary_reward(sample, config.reward_key) for sample in samples_of_group]
    values = session_credits(rewards, config.advantage_estimator, normalize_std=config.grpo_std_normalization)
    if not all(math.isfinite(value) for value in values):
        raise CreditError(
            f"group {samples_of_group[0].group}: its rewards lie too far apart to be normalized "
            f"({min(rewards):g} to {max(rewards):g}); scale them"
        )
    for sample, value in zip(samples_of_group, values, strict=True):
        sample.advantage = value


def session_credits(rewards: Sequence[float], estimator: str, *, normalize_std: bool = True) -> list[float]:
    """The credit of each Session of a Group from all of its rewards.

        grpo, gspo, cispo              `grpo_credits`, centred only without `normalize_std`
        dr_grpo                        `grpo_credits`, centred only
        reinforce_plus_plus_baseline   the same: the Group's mean is the baseline (Hu et al. 2025, arXiv:2501.03262)
        rloo                           `rloo_credits`
        reinforce_plus_plus            A_i = r_i: no baseline but the whitening over the batch (same paper, eq. 8 and 9)

    Args:
      rewards: one finite number per Session, (n,).
      estimator: `--advantage-estimator`.
      normalize_std: `--grpo-std-normalization`.
    """
    if estimator == "reinforce_plus_plus":
        return list(rewards)
    if estimator == "rloo":
        return rloo_credits(rewards)
    divides = normalize_std and estimator in ("grpo", "gspo", "cispo")
    return grpo_credits(rewards, normalize_std=divides)


def rloo_credits(rewards: Sequence[float]) -> list[float]:
    """Leave-one-out credit: the reward less the mean of the others.

        A_i = r_i - (1 / (n - 1)) sum_{j != i} r_j = (n / (n - 1)) (r_i - mean(r))

    Ahmadian et al. 2024, arXiv:2402.14740, section 3.2 (after Kool et al. 2019). Equal rewards give exactly 0.0, and so
    does one reward alone: it has no others.

    Args:
      rewards: one finite number per Session, (n,).
    """
    n = len(rewards)
    centred = grpo_credits(rewards, normalize_std=False)
    return [c * (n / (n - 1)) for c in centred] if n > 1 else centred


def grpo_credits(rewards: Sequence[float], *, normalize_std: bool = True) -> list[float]:
    """Group-relative credit.

        A_i = (r_i - mean(r)) / (std(r) + eps)      std(r)^2 = sum_i (r_i - mean(r))^2 / (n - 1),  eps = 1e-6

    Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2. The paper leaves open which standard deviation;
    this is the sample one (n - 1), as in TRL, verl and slime. Without `normalize_std` the credit is only centred,
    A_i = r_i - mean(r): Liu et al. 2025, Dr. GRPO, arXiv:2503.20783.

    Equal rewards, one reward among them, give exactly 0.0. Sums are exact, so the order of rewards does not matter.

    Args:
      rewards: one finite number per Session, (n,).

    Returns:
      (n,) credits in the same order; not finite only where the squares leave the range of a float.
    """
    n = len(rewards)
    if n == 0 or min(rewards) == max(rewards):
        return [0.0] * n
    mean = math.fsum(reward / n for reward in rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(c * c / (n - 1) for c in centred))
    return [c / (std + STD_EPS) if math.isfinite(std) else math.nan for c in centred]


def several_contexts(samples: Sequence[Sample]) -> str | None:
    """Which Session exported more than one context, and which; None where none did."""
    names: dict[str, list[str]] = {}
    for sample in samples:
        names.setdefault(sample.place, []).append(sample.name or "(implicit)")
    for place, exported in names.items():
        if len(exported) > 1:
            return f"session {place} exported several contexts ({', '.join(exported)})"
    return None
