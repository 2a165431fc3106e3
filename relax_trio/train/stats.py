"""The numbers of an optimizer phase: sums over tokens, means of optimizer steps, metrics of the phase."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from attrs import define, field, frozen

from relax_trio.data.sample import Sample
from relax_trio.train.advantage import Moments
from relax_trio.train.kl import kl_estimate

GAP_METRICS = ("train/rollout_logprob_abs_diff", "train/rollout_logprob_abs_diff_mean", "train/rollout_kl")
"""Largest and mean |training − rollout| logprob of a phase, and KL(rollout || training) by estimator k3.

They are infinite, as no other metric, where a logprob isn't finite.

It is taken under the weights that a row met when it was handed over. A phase that gets all its rows at once takes it
before any weight changes; in one that gets them in batches, the rows behind its first optimizer step are measured
under the weights they are trained on (or, where an optimizer step falls inside a batch, under those before it).
"""


@define(eq=False, kw_only=True)
class Gap:
    """|training − rollout| logprob over trained tokens, in nats.

    Attributes:
      largest: infinite where a token's gap is not a finite number.
      total: sum over the tokens, infinite likewise.
      divergence: sum of k3 over the tokens, in nats, infinite likewise.
      n_tokens: trained tokens.
    """

    largest: float = 0.0
    total: float = 0.0
    divergence: float = 0.0
    n_tokens: int = 0

    def add(self, log_ratio: torch.Tensor) -> None:
        """Add (K,) training minus rollout logprobs."""
        if not len(log_ratio):
            return
        gap = log_ratio.abs().nan_to_num(nan=math.inf, posinf=math.inf)
        # The tokens are the rollout policy's, so the reference of the estimate is the training's.
        k3 = kl_estimate(-log_ratio.double(), torch.zeros_like(log_ratio).double(), "k3")
        divergence = float(k3.sum().nan_to_num(nan=math.inf, posinf=math.inf))
        self.join(Gap(largest=float(gap.max()), total=float(gap.sum()), divergence=divergence, n_tokens=len(gap)))

    def join(self, other: Gap) -> None:
        """Add the tokens of another gap."""
        self.largest = max(self.largest, other.largest)
        self.total += other.total
        self.divergence += other.divergence
        self.n_tokens += other.n_tokens

    @property
    def metrics(self) -> dict[str, float]:
        """`GAP_METRICS` of at least one token."""
        numbers = (self.largest, self.total / self.n_tokens, self.divergence / self.n_tokens)
        return dict(zip(GAP_METRICS, numbers, strict=True))


DIVIDED_LOSSES = ("train/loss", "train/pg_loss")
"""Metrics that are what the optimizer step minimizes; the others are weighted means over tokens."""


@define(eq=False, kw_only=True)
class StepStats:
    """Sums over the tokens of an optimizer step, or of a part of one; weighted as the loss is.

    Attributes:
      normalizer: the sum of the weights of all tokens, see `packing.loss_normalizer`; parts add up.
      divisor: what the optimizer step divides gradient and losses by: the same, but for `dr_grpo`; parts add up.
      sums: metric name → sum of weight times value.
      gap: to the logprobs of rollout.
      ratio_max: largest ratio of new to old probability.
      advantages: of the tokens, as the loss takes them.
    """

    normalizer: int = 0
    divisor: int = 0
    sums: dict[str, float] = field(factory=dict)
    gap: Gap = field(factory=Gap)
    ratio_max: float = 0.0
    advantages: Moments = field(factory=Moments)

    def add(self, values: Mapping[str, torch.Tensor], gap: torch.Tensor, ratio: torch.Tensor) -> None:
        """Add one micro-batch: () sums by metric, (K,) training minus rollout logprobs, (K,) ratios."""
        self._add_sums({name: float(value) for name, value in values.items()})
        self.gap.add(gap)
        if len(ratio):
            self.ratio_max = max(self.ratio_max, float(ratio.max()))

    def join(self, other: StepStats) -> None:
        """Add another part of the optimizer step."""
        self.normalizer += other.normalizer
        self.divisor += other.divisor
        self._add_sums(other.sums)
        self.gap.join(other.gap)
        self.advantages.join(other.advantages)
        self.ratio_max = max(self.ratio_max, other.ratio_max)

    @property
    def means(self) -> dict[str, float]:
        """Metric name → weighted mean, or loss. Only of a whole optimizer step."""
        return {
            name: value / (self.divisor if name in DIVIDED_LOSSES else self.normalizer)
            for name, value in self.sums.items()
        }

    @property
    def n_tokens(self) -> int:
        """Trained tokens."""
        return self.gap.n_tokens

    @property
    def finite(self) -> bool:
        """Whether every number is one; if not, the gradient isn't worth applying."""
        return math.isfinite(self.gap.total) and all(math.isfinite(value) for value in self.sums.values())

    def _add_sums(self, sums: Mapping[str, float]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value


@frozen(kw_only=True)
class OptimizerStep:
    """What one optimizer step did.

    Attributes:
      number: its place in the run, from 0; skipped steps count.
      lr: learning rate.
      norm: gradient norm before clipping; NaN or infinite when the step was skipped.
    """

    number: int
    lr: float
    norm: float


@frozen(kw_only=True)
class PhaseResult:
    """Metrics of an optimizer phase and the optimizer steps (numbered over the run) that were skipped in it."""

    metrics: dict[str, float]
    skipped: tuple[int, ...]


@define(eq=False)
class PhaseReport:
    """Collects the optimizer steps of a phase.

    A skipped step adds to no mean, because its numbers may be NaN; with every step skipped the means are 0.0 and
    `train/n_optimizer_steps` says why. The gap to rollout is told all the same: that is where such numbers show.

    Attributes:
      n_samples: rows consumed, those without a trained token included.
      gap: to rollout, every trained token once; see `GAP_METRICS` for the weights it is of.
      staleness: versions between the weights that wrote a token and those that its row met, see `staleness`.
      steps: optimizer steps in order.
    """

    n_samples: int = 0
    staleness: Moments = field(factory=Moments)
    gap: Gap = field(factory=Gap)
    steps: list[tuple[OptimizerStep, StepStats]] = field(factory=list)

    def result(self) -> PhaseResult:
        """The metrics of the phase, which has at least one optimizer step."""
        names = self.steps[0][1].sums
        kept = [(step, stats) for step, stats in self.steps if math.isfinite(step.norm)]
        means = [stats.means for _, stats in kept]
        n = max(1, len(kept))
        metrics = {name: sum(values[name] for values in means) / n for name in names}
        metrics |= {
            "train/grad_norm": sum(step.norm for step, _ in kept) / n,
            "train/ratio_max": max((stats.ratio_max for _, stats in kept), default=0.0),
            "train/lr": self.steps[-1][0].lr,
            "train/n_tokens": float(sum(stats.n_tokens for _, stats in self.steps)),
            "train/n_samples": float(self.n_samples),
            "train/n_optimizer_steps": float(len(kept)),
            "train/n_skipped_steps": float(len(self.steps) - len(kept)),
        }
        advantages = Moments()
        for _, stats in kept:
            advantages.join(stats.advantages)
        metrics |= _spread("train/advantages", advantages)
        if self.staleness.n:
            metrics |= {"train/staleness/mean": self.staleness.mean, "train/staleness/max": self.staleness.high}
        odd = {name for name, value in metrics.items() if not math.isfinite(value)}
        assert not odd, f"{odd} are not finite"
        metrics |= self.gap.metrics
        skipped = tuple(step.number for step, _ in self.steps if not math.isfinite(step.norm))
        return PhaseResult(metrics=metrics, skipped=skipped)


def staleness(samples: Sequence[Sample], n_phases: int) -> Moments:
    """Versions between the weights that wrote each generated token and those after `n_phases` optimizer phases.

    Weights that aren't numbered as ours (another trainer's engine) are left out.
    """
    moments = Moments()
    for sample in samples:
        for span in sample.weight_versions:
            if span.n_tokens and span.version.isdecimal():
                age = float(n_phases - int(span.version))
                moments.join(Moments(n=span.n_tokens, mean=age, low=age, high=age))
    return moments


def _spread(name: str, moments: Moments) -> dict[str, float]:
    """`name/mean|std|min|max`; nothing where there are no numbers."""
    if not moments.n:
        return {}
    return {
        f"{name}/mean": moments.mean,
        f"{name}/std": moments.std,
        f"{name}/min": moments.low,
        f"{name}/max": moments.high,
    }
