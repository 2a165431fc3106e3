"""The optimizer phase, as plain blocking code: model, AdamW, gradient accumulation, clipping, metrics.

Runs in a worker thread and knows nothing of Trio: the caller hands in what to ask between micro-batches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field, frozen

from relax_trio.data.sample import Sample
from relax_trio.errors import TrainError
from relax_trio.train.loss import clipped_policy_loss, mean_kl
from relax_trio.train.packing import Batch, micro_batches, row_order, row_weights, split_optimizer_batches
from relax_trio.train.policy import Policy
from relax_trio.train.schedule import learning_rate
from relax_trio.train.settings import TrainerSettings
from relax_trio.train.weights import put_back, snapshot

GAP_METRICS = ("train/rollout_logprob_abs_diff", "train/rollout_logprob_abs_diff_mean")
"""Largest and mean |training − rollout| logprob of a phase; infinite, as no other metric, where one isn't finite."""


@define(eq=False, kw_only=True)
class Gap:
    """|training − rollout| logprob over trained tokens, in nats.

    Attributes:
      largest: infinite where a token's gap is not a finite number.
      total: sum over the tokens, infinite likewise.
      n_tokens: trained tokens.
    """

    largest: float = 0.0
    total: float = 0.0
    n_tokens: int = 0

    def add(self, log_ratio: torch.Tensor) -> None:
        """Add (K,) training minus rollout logprobs."""
        gap = log_ratio.abs().nan_to_num(nan=math.inf, posinf=math.inf)
        self.join(Gap(largest=float(gap.max()), total=float(gap.sum()), n_tokens=len(gap)))

    def join(self, other: Gap) -> None:
        """Add the tokens of another gap."""
        self.largest = max(self.largest, other.largest)
        self.total += other.total
        self.n_tokens += other.n_tokens


@define(eq=False, kw_only=True)
class StepStats:
    """Sums over the micro-batches of one optimizer step; means are weighted as the loss is.

    Attributes:
      sums: metric name → sum of weight times value.
      gap: to the logprobs of rollout.
      ratio_max: largest ratio of new to old probability.
    """

    sums: dict[str, float] = field(factory=dict)
    gap: Gap = field(factory=Gap)
    ratio_max: float = 0.0

    def add(self, values: Mapping[str, torch.Tensor], log_ratio: torch.Tensor, ratio: torch.Tensor) -> None:
        """Add one micro-batch: () sums by metric, (K,) new minus old logprobs, (K,) ratios."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        self.gap.add(log_ratio)
        self.ratio_max = max(self.ratio_max, float(ratio.max()))

    @property
    def n_tokens(self) -> int:
        """Trained tokens."""
        return self.gap.n_tokens

    @property
    def finite(self) -> bool:
        """Whether every number is one; if not, the gradient isn't worth applying."""
        return math.isfinite(self.gap.total) and all(math.isfinite(value) for value in self.sums.values())


@frozen(kw_only=True)
class PhaseResult:
    """Metrics of an optimizer phase and the optimizer steps (numbered over the run) that were skipped in it."""

    metrics: dict[str, float]
    skipped: tuple[int, ...]


class Updater:
    """A policy and its optimizer.

    Attributes:
      policy: the model being trained.
      n_phases: completed phases.
      n_steps: optimizer steps tried, the skipped ones included: the schedule's position.
      weights: a copy of the model's weights as of the last completed phase.
    """

    def __init__(self, policy: Policy, settings: TrainerSettings) -> None:
        self.policy = policy
        self.n_phases = 0
        self.n_steps = 0
        self.weights = snapshot(policy.model)
        self._settings = settings
        self._parameters = [p for p in policy.model.parameters() if p.requires_grad]
        train = settings.train
        # Norm scales and biases are not decayed: shrinking them regularizes nothing.
        matrices = [p for p in self._parameters if p.dim() >= 2]
        others = [p for p in self._parameters if p.dim() < 2]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=train.lr,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_eps,
        )

    def run_phase(self, samples: Sequence[Sample], check_stop: Callable[[], None]) -> PhaseResult:
        """Train on all rows of a rollout step.

        Args:
          samples: the rows.
          check_stop: raises to give the phase up; asked between micro-batches.

        Raises:
          TrainError: nothing to train on, or malformed rows.

        Whatever is raised, model and optimizer are as before the phase. For that, a copy of the optimizer's state
        (8 bytes a parameter) is kept from the first optimizer step to the end of the phase.

        The gap to rollout (`GAP_METRICS`) is that of the weights before the phase, for all rows: those of later
        optimizer steps are scored once more for it, without gradients, before the first one.
        """
        rows = row_order(samples) if self._settings.deterministic else list(samples)
        train = self._settings.train
        packed = [
            micro_batches(batch, row_weights(batch, per_token=train.calculate_per_token_loss), train.micro_batch_size)
            for batch in split_optimizer_batches(rows, train.global_batch_size)
        ]
        packed = [batches for batches in packed if batches]
        if not packed:
            raise TrainError(f"none of the {len(rows)} rows of the step has a trained token")
        self._check_vocabulary(packed)
        report = _PhaseReport(self._gap(packed[1:], check_stop))
        with self._all_or_nothing() as keep_optimizer:
            for batches in packed:
                stats = self.accumulate(batches, check_stop)
                keep_optimizer()
                lr = learning_rate(train, self.n_steps, self._settings.n_total)
                norm = self._apply(lr, stats)
                report.add(stats, norm, lr, self.n_steps)
                self.n_steps += 1
            weights = snapshot(self.policy.model)
        self.weights = weights
        self.n_phases += 1
        return report.result(len(rows))

    def accumulate(self, batches: Sequence[Batch], check_stop: Callable[[], None] = lambda: None) -> StepStats:
        """Leave the gradient of one optimizer batch in the parameters' `grad`; old gradients are dropped first."""
        self._optimizer.zero_grad(set_to_none=True)
        stats = StepStats()
        for batch in batches:
            check_stop()
            self._backward(batch, stats)
        return stats

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides the weights; tensors are the live ones."""
        return {"optimizer": self._optimizer.state_dict(), "n_phases": self.n_phases, "n_steps": self.n_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over `state()` of another run; learning rate and other settings stay those of this run.

        Raises:
          KeyError, TypeError, ValueError: it is of another model or not a state at all.
        """
        own = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(state["optimizer"])
        for group, options in zip(self._optimizer.param_groups, own, strict=True):
            group.update(options)
        for parameter, values in self._optimizer.state.items():
            if any(v.shape != parameter.shape for v in values.values() if torch.is_tensor(v) and v.dim()):
                raise ValueError("the optimizer's tensors don't have the model's shapes")
        self.n_phases = int(state["n_phases"])
        self.n_steps = int(state["n_steps"])

    @contextmanager
    def _all_or_nothing(self) -> Iterator[Callable[[], None]]:
        """Undo the optimizer steps of a block that raises; the block calls what it is given before each of them."""
        first_step = self.n_steps
        kept: list[dict[str, Any]] = []

        def keep_optimizer() -> None:
            # No sooner than the first step: with its gradient complete, no activations compete for the memory.
            if not kept:
                kept.append(copy.deepcopy(self._optimizer.state_dict()))

        try:
            yield keep_optimizer
        except BaseException:
            self._optimizer.zero_grad(set_to_none=True)
            put_back(self.policy.model, self.weights)
            self.n_steps = first_step
            if kept:
                self._optimizer.load_state_dict(kept[0])
            raise

    @torch.no_grad()
    def _gap(self, packed: Sequence[Sequence[Batch]], check_stop: Callable[[], None]) -> Gap:
        """The gap to rollout under the weights as they are."""
        gap = Gap()
        for batches in packed:
            for batch in batches:
                check_stop()
                logprobs, _ = self.policy.score(batch, self._settings.distribution)  # (K,)
                gap.add(logprobs - batch.rollout_logprobs[batch.loss_mask].to(logprobs))
        return gap

    def _backward(self, batch: Batch, stats: StepStats) -> None:
        train = self._settings.train
        logprobs, entropy = self.policy.score(batch, self._settings.distribution)  # (K,), (K,)
        mask = batch.loss_mask
        old = batch.rollout_logprobs[mask].to(logprobs)  # (K,)
        weights = batch.weights[mask].to(logprobs)  # (K,)
        result = clipped_policy_loss(
            logprobs,
            old,
            batch.advantages[mask].to(logprobs),
            weights,
            eps_low=train.eps_clip,
            eps_high=train.eps_clip if train.eps_clip_high is None else train.eps_clip_high,
        )
        result.loss.backward()  # type: ignore[no-untyped-call]
        values = {
            "train/loss": result.loss.detach(),
            "train/entropy": (weights * entropy).sum(),
            "train/ppo_kl": mean_kl(result.log_ratio, weights),
            "train/pg_clipfrac": (weights * result.clipped).sum(),
            "train/ratio": (weights * result.ratio).sum(),
        }
        stats.add(values, result.log_ratio, result.ratio)

    def _apply(self, lr: float, stats: StepStats) -> float:
        """Clip and step; returns the gradient norm before clipping, NaN or infinite when the step was skipped."""
        bound = self._settings.train.clip_grad
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, bound if bound > 0 else math.inf))
        if not stats.finite:
            norm = math.nan
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _check_vocabulary(self, packed: Sequence[Sequence[Batch]]) -> None:
        highest = max(int(batch.ids.max()) for batches in packed for batch in batches)
        lowest = min(int(batch.ids.min()) for batches in packed for batch in batches)
        if highest >= self.policy.n_vocab or lowest < 0:
            raise TrainError(
                f"token ids run from {lowest} to {highest}, but the trained model has {self.policy.n_vocab} tokens; "
                "rollout and trainer must use the same checkpoint"
            )


@define(eq=False)
class _PhaseReport:
    """Collects the optimizer steps of a phase.

    A skipped step adds to no mean, because its numbers may be NaN; with every step skipped the means are 0.0 and
    `train/n_optimizer_steps` says why. The gap to rollout is told all the same: that is where such numbers show.

    Attributes:
      gap: to rollout, of the rows that are not in the first optimizer step.
    """

    gap: Gap
    first: StepStats | None = None
    kept: list[tuple[StepStats, float]] = field(factory=list)
    skipped: list[int] = field(factory=list)
    lr: float = 0.0
    n_tokens: int = 0

    def add(self, stats: StepStats, norm: float, lr: float, step: int) -> None:
        self.first = self.first or stats
        self.lr = lr
        self.n_tokens += stats.n_tokens
        if math.isfinite(norm):
            self.kept.append((stats, norm))
        else:
            self.skipped.append(step)

    def result(self, n_samples: int) -> PhaseResult:
        assert self.first is not None, "a phase has an optimizer step"
        n = max(1, len(self.kept))
        metrics = {name: sum(stats.sums[name] for stats, _ in self.kept) / n for name in self.first.sums}
        metrics |= {
            "train/grad_norm": sum(norm for _, norm in self.kept) / n,
            "train/ratio_max": max((stats.ratio_max for stats, _ in self.kept), default=0.0),
            "train/lr": self.lr,
            "train/n_tokens": float(self.n_tokens),
            "train/n_samples": float(n_samples),
            "train/n_optimizer_steps": float(len(self.kept)),
            "train/n_skipped_steps": float(len(self.skipped)),
        }
        # The weights have not changed before the first optimizer step, so its own gap is as good as one taken apart.
        self.gap.join(self.first.gap)
        metrics |= zip(GAP_METRICS, (self.gap.largest, self.gap.total / self.gap.n_tokens), strict=True)
        return PhaseResult(metrics=metrics, skipped=tuple(self.skipped))
