"""Losses and gradients against TRL's GRPO trainer: its loss function runs as published, on logprobs that are given.

Needs TRL: tools/trl_env makes an environment that has it.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from builders_train import relative, settings

from relax_trio.train.objective import objective
from relax_trio.train.sequences import Sequences
from relax_trio.train.targets import Targets

pytestmark = [
    pytest.mark.trl,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed; see tools/trl_env"),
]

N_ROWS, LENGTH, BUDGET = 6, 9, 13

CASES = {
    # name: (flags of ours, attributes of TRL's trainer)
    "grpo": ({}, {}),
    "clip-higher": ({"eps_clip": 0.1, "eps_clip_high": 0.3}, {"epsilon_low": 0.1, "epsilon_high": 0.3}),
    "dual clip": ({"eps_clip_c": 1.3}, {"delta": 1.3}),
    "token mean": ({"calculate_per_token_loss": True}, {"loss_type": "dapo"}),
    "dr_grpo": ({"estimator": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "gspo": (
        {"estimator": "gspo", "eps_clip": 0.02, "eps_clip_high": 0.03},
        {"importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
    ),
    "cispo": (
        {"estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.15, "calculate_per_token_loss": True},
        {"loss_type": "cispo", "epsilon_high": 1.15},  # TRL's is the bound itself
    ),
    "kl loss": ({"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3"}, {"beta": 0.2}),
    "kl loss, unbiased": (
        {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3", "use_unbiased_kl": True},
        {"beta": 0.2, "unbiased": True},
    ),
    "entropy bonus": (
        {"entropy_coef": 0.1, "calculate_per_token_loss": True},
        {"loss_type": "dapo", "entropy_coef": 0.1, "_entropy_bonus_enabled": True},
    ),
    "truncated importance sampling": ({"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.9}, {"use_vllm": True}),
    "masked importance sampling": ({"use_mis": True, "tis_clip": 1.1, "tis_clip_low": 0.9}, {"use_vllm": True}),
    "off-policy sequence masking": (
        {"use_opsm": True, "opsm_delta": 0.01},
        {"off_policy_mask_threshold": 0.01},
    ),
    "all at once": (
        {
            "estimator": "gspo",
            "use_kl_loss": True,
            "kl_loss_coef": 0.2,
            "kl_loss_type": "k3",
            "use_opsm": True,
            "opsm_delta": 0.01,
            "eps_clip_c": 1.5,
        },
        {
            "importance_sampling_level": "sequence",
            "beta": 0.2,
            "off_policy_mask_threshold": 0.01,
            "delta": 1.5,
        },
    ),
    "all corrections": (
        {
            "use_kl_loss": True,
            "kl_loss_coef": 0.2,
            "kl_loss_type": "k3",
            "use_mis": True,
            "use_opsm": True,
            "opsm_delta": 0.01,
        },
        {"beta": 0.2, "use_vllm": True, "off_policy_mask_threshold": 0.01},
    ),
}


@pytest.fixture(scope="module")
def grpo_trainer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.trainer.grpo_trainer import GRPOTrainer
    return GRPOTrainer


class Tokens:
    """Padded logprobs of rows with untrained stretches, as tool results make them."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)

        def normal(scale):
            return scale * torch.randn(N_ROWS, LENGTH, dtype=torch.float64, generator=generator)

        lens = torch.randint(3, LENGTH + 1, (N_ROWS,), generator=generator)
        self.completion_mask = (torch.arange(LENGTH)[None] < lens[:, None]).long()
        self.tool_mask = (torch.rand(N_ROWS, LENGTH, generator=generator) < 0.7).long()
        self.tool_mask[:, 0] = 1
        self.mask = (self.completion_mask * self.tool_mask).bool()
        self.sampling = -normal(1.0).abs() - 0.1
        self.old = self.sampling + normal(0.1)
        self.new = self.old + normal(0.15)
        self.ref = self.old + normal(0.3)
        self.entropy = normal(1.0).abs()
        self.advantages = torch.randn(N_ROWS, dtype=torch.float64, generator=generator)


def theirs(trainer, tokens, flags, attributes):
    """(loss, gradients by the logprobs and the entropies of trained tokens) of TRL's own function."""
    new, entropy = (t.clone().requires_grad_() for t in (tokens.new, tokens.entropy))
    args = SimpleNamespace(
        delta=attributes.get("delta"), use_bias_correction_kl=attributes.get("unbiased", False), steps_per_generation=1
    )
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda t: t, reduce=lambda t, reduction: t, sync_gradients=True
    )
    defaults = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "use_vllm": False,
        "off_policy_mask_threshold": None,
        "_entropy_bonus_enabled": False,
    }
    self = SimpleNamespace(
        **{**defaults, **attributes},
        args=args,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=BUDGET,
        get_off_policy_mask=trainer.get_off_policy_mask,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, entropy, None),
    )
    nothing = torch.zeros(N_ROWS, 0, dtype=torch.long)
    ratio = (tokens.old - tokens.sampling).exp()
    low, high = flags.get("tis_clip_low", 0.0), flags.get("tis_clip", 2.0)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros_like(tokens.completion_mask),
        "completion_mask": tokens.completion_mask,
        "tool_mask": tokens.tool_mask,
        "advantages": tokens.advantages,
        "old_per_token_logps": tokens.old,
        "sampling_per_token_logps": tokens.sampling,
        "ref_per_token_logps": tokens.ref,
        "num_items_in_batch": tokens.mask.sum(),
        "importance_sampling_ratio": ratio.clamp(low, high)
        if flags.get("use_tis")
        else ratio.masked_fill((ratio < low) | (ratio > high), 0.0),
    }
    loss = trainer._compute_loss(self, None, inputs)
    gradients = torch.autograd.grad(loss, (new, entropy), allow_unused=True)
    return loss.detach(), [torch.zeros_like(new[tokens.mask]) if g is None else g[tokens.mask] for g in gradients]


def ours(tokens, flags):
    """The same of our objective, on flat tensors of trained tokens."""
    config = settings(token_budget=BUDGET, **{"use_rollout_logprobs": False, **flags})
    mask = tokens.mask
    n_of_row = mask.sum(1)
    weights = torch.ones(N_ROWS, dtype=torch.float64) if config.per_token else 1.0 / n_of_row.double()
    divisor = N_ROWS
    if config.per_token:
        divisor = N_ROWS * BUDGET if config.estimator == "dr_grpo" else int(mask.sum())
    rows = mask.nonzero()[:, 0]
    new, entropy = (t[mask].clone().requires_grad_() for t in (tokens.new, tokens.entropy))
    targets = Targets(
        batch=None,
        rollout=tokens.sampling[mask],
        advantages=tokens.advantages[rows],
        weights=weights[rows],
        sequences=Sequences(
            sessions=tuple(range(N_ROWS)),
            of_token=rows,
            n_tokens=n_of_row.double(),
            away_ratio=torch.zeros(N_ROWS, dtype=torch.float64),
            away_drift=torch.zeros(N_ROWS, dtype=torch.float64),
        ),
        old=tokens.old[mask],
        ref=tokens.ref[mask],
    )
    result = objective(new, entropy, targets, config)
    loss = result.loss / divisor
    gradients = torch.autograd.grad(loss, (new, entropy), allow_unused=True)
    return loss.detach(), [torch.zeros_like(new) if g is None else g for g in gradients], result


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradients_equal_those_of_trl(case, seed, grpo_trainer):
    flags, attributes = CASES[case]
    tokens = Tokens(seed)
    expected, (by_logprob, by_entropy) = theirs(grpo_trainer, tokens, flags, attributes)
    loss, (ours_by_logprob, ours_by_entropy), _ = ours(tokens, flags)
    assert float(loss) == pytest.approx(float(expected), rel=1e-9, abs=1e-12)
    assert relative(ours_by_logprob, by_logprob) < 1e-9
    assert torch.allclose(ours_by_entropy, by_entropy, rtol=1e-9, atol=1e-15)


def test_the_cases_reach_every_branch():
    """Clips, bounds and masks take part in the comparison: each holds for some tokens and not for all."""
    for case, metric in {
        "clip-higher": "train/pg_clipfrac_high",
        "dual clip": "train/pg_clipfrac_dual",
        "gspo": "train/pg_clipfrac",
        "cispo": "train/pg_clipfrac_high",
        "truncated importance sampling": "train/tis_clipfrac",
        "masked importance sampling": "train/masked_frac",
        "off-policy sequence masking": "train/opsm_clipfrac",
    }.items():
        flags, _ = CASES[case]
        results = [ours(Tokens(seed), {**flags, "calculate_per_token_loss": True})[2] for seed in range(5)]
        share = sum(float(result.sums[metric]) for result in results)
        assert 0 < share < sum(len(result.gap) for result in results), case
