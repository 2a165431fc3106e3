"""The learning rate as a function of the optimizer step: no state, so that nothing about it needs saving."""

from __future__ import annotations

import math

from relax_trio.config.tree import RolloutConfig, TrainConfig
from relax_trio.errors import ConfigError


def n_optimizer_steps(rollout: RolloutConfig, train: TrainConfig, n_rollout: int) -> int:
    """Optimizer steps of a run of `n_rollout` steps that trains full batches: what a decay is stretched over."""
    n_sessions = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    return n_rollout * math.ceil(n_sessions / (train.global_batch_size or n_sessions))


def learning_rate(train: TrainConfig, optimizer_step: int, n_total: int | None) -> float:
    """Learning rate of one optimizer step.

    Warm-up: lr * (step + 1) / lr_warmup_iters for step < lr_warmup_iters. After it, with
    x = (step - lr_warmup_iters) / (n_total - lr_warmup_iters) kept in [0, 1]: constant lr, linear lr * (1 - x), or
    cosine lr * (1 + cos(pi * x)) / 2.

    Args:
      train: the schedule.
      optimizer_step: from 0; skipped steps count.
      n_total: optimizer steps of the run; not needed by the constant schedule.

    Raises:
      ConfigError: a decay without `n_total`.
    """
    warmup = train.lr_warmup_iters
    if optimizer_step < warmup:
        return train.lr * (optimizer_step + 1) / warmup
    if train.lr_decay_style == "constant":
        return train.lr
    if n_total is None:
        raise ConfigError(f"--lr-decay-style {train.lr_decay_style} needs the number of steps; set --num-rollout")
    x = min(1.0, (optimizer_step - warmup) / max(1, n_total - warmup))
    if train.lr_decay_style == "linear":
        return train.lr * (1.0 - x)
    return train.lr * (1.0 + math.cos(math.pi * x)) / 2.0
