"""From the credit of a row to the advantage of its tokens. Owns no credit: rewards become credit in `reward/`.

In this order: the credit of the row or of its turns, the reference's KL where the estimator shapes returns by it,
whitening over an optimizer batch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
from attrs import define

from relax_trio.data.sample import Sample
from relax_trio.errors import TrainError


def token_advantages(sample: Sample) -> array[float]:
    """Spread the base credit of a row over its trained tokens, undivided: A_t = credit * mask_t.

    This is the outcome-supervised advantage of GRPO (Shao et al. 2024, arXiv:2402.03300, 4.1.2): every token of a
    response carries the response's normalized reward. Where the credit has one number for each assistant turn, the
    tokens of turn j carry the j-th: A_t = credit_j * mask_t.

    Returns:
      `array('d')`, R values aligned with `sample.loss_mask`; 0.0 where the mask is 0.

    Raises:
      TrainError: the row has no credit, one that is not finite, or not one for every turn.
    """
    credit = sample.advantage
    if credit is None:
        raise TrainError(f"session {sample.place}: a row without credit reached the trainer; compute credit first")
    if not all(math.isfinite(value) for value in (credit if isinstance(credit, tuple) else (credit,))):
        raise TrainError(f"session {sample.place}: its credit is {credit}; credit must be a finite number")
    if not isinstance(credit, tuple):
        return array("d", [credit if trained else 0.0 for trained in sample.loss_mask])
    if len(credit) != len(sample.turn_lens):
        raise TrainError(f"session {sample.place}: {len(credit)} credits for {len(sample.turn_lens)} assistant turns")
    advantages = array("d", bytes(8 * len(sample.loss_mask)))
    for value, start, length in zip(credit, sample.turn_starts, sample.turn_lens, strict=True):
        for position in range(start, start + length):
            if sample.loss_mask[position]:
                advantages[position] = value
    return advantages


def return_kl(kl: Sequence[torch.Tensor], sessions: Sequence[int], estimator: str) -> list[torch.Tensor]:
    """The KL to the reference that is taken from the return of each token, beta times of it.

        reinforce_plus_plus:           A_t = credit - beta * sum of kl_u over the tokens u >= t of the Session
        reinforce_plus_plus_baseline:  A_t = credit - beta * kl_t

    The first is the return to go, discount 1, of the reward r_t = [t is last] credit - beta * kl_t. Behind the tokens
    of a row come those of its Session's later rows, in the order of export: a Session is one episode, however it is
    divided into contexts.
    Source: Hu et al. 2025, REINFORCE++ (arXiv:2501.03262), eq. 7 and 8; the second as slime and Relax have it.

    Args:
      kl: for each row (k,) estimates of the KL of the old policy to the reference at its tokens, see `kl.kl_estimate`.
      sessions: the Session of each row; its rows come in the order of export.
      estimator: one of the two names.

    Returns:
      (k,) for each row.
    """
    if estimator == "reinforce_plus_plus_baseline":
        return list(kl)
    assert estimator == "reinforce_plus_plus", f"{estimator} doesn't shape returns by the KL"
    found: list[torch.Tensor] = []
    behind: dict[int, torch.Tensor] = {}
    for part, session in zip(reversed(kl), reversed(sessions), strict=True):
        to_go = part.flip(0).cumsum(0).flip(0) + behind.get(session, 0.0)
        found.append(to_go)
        if len(part):
            behind[session] = to_go[0]
    return found[::-1]


WHITEN_EPS = 1e-8
"""Added to the variance in whitening, as in slime and verl."""


@define(eq=False, kw_only=True)
class Moments:
    """Mean, deviation and range of numbers; two of them join into that of both.

    Deviations are from the mean, not from 0: rewards that are large and nearly alike keep their difference.

    Attributes:
      n: how many.
      mean: 0.0 of nothing.
      deviations: sum of their squared distances from the mean.
      low, high: the smallest and the largest; infinite where there are none.
    """

    n: int = 0
    mean: float = 0.0
    deviations: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, values: torch.Tensor) -> Moments:
        """Of a (K,) tensor."""
        if not len(values):
            return cls()
        exact = values.double()
        mean = exact.mean()
        return cls(
            n=len(exact),
            mean=float(mean),
            deviations=float((exact - mean).square().sum()),
            low=float(exact.min()),
            high=float(exact.max()),
        )

    def join(self, other: Moments) -> None:
        """Add the numbers of another one (Chan et al. 1983)."""
        n = self.n + other.n
        if other.n:
            gap = other.mean - self.mean
            self.deviations += other.deviations + gap * gap * self.n * other.n / n
            self.mean += gap * other.n / n
        self.n = n
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)

    @property
    def variance(self) -> float:
        """The sample variance (n - 1); 0.0 of one number and where all are equal."""
        if self.n < 2 or self.low == self.high:
            return 0.0
        return self.deviations / (self.n - 1)

    @property
    def std(self) -> float:
        """The root of the variance."""
        return math.sqrt(self.variance)


def whitened(advantages: torch.Tensor, moments: Moments) -> torch.Tensor:
    """Shift and scale advantages to mean 0 and variance 1 over the trained tokens of an optimizer batch.

        A'_t = (A_t - mean(A)) / sqrt(var(A) + 1e-8),    var with n - 1

    Source: Andrychowicz et al. 2021 (arXiv:2006.05990, "per minibatch advantage normalization"); over all tokens of the
    batch as in REINFORCE++ (Hu et al. 2025, arXiv:2501.03262, eq. 9), slime and Relax. Equal advantages become 0.0.

    Args:
      advantages: (K,) of some trained tokens.
      moments: of all trained tokens of the optimizer batch.
    """
    if moments.low == moments.high:
        return torch.zeros_like(advantages)
    return (advantages - moments.mean) / math.sqrt(moments.variance + WHITEN_EPS)
