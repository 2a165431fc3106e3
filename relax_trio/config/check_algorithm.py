"""Whether the flags of the algorithm agree with each other: estimator, loss, KL, corrections.

Refused are contradictions and flags that would change nothing; warned of is what can be run but is seldom meant.
"""

from __future__ import annotations

from collections.abc import Mapping

from relax_trio.config.check_files import reference_problems
from relax_trio.config.parse import COMMAND_LINE
from relax_trio.config.tree import Config

WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators that are defined with whitening, and whose returns may hold the KL."""

DIVIDES_BY_STD = ("grpo", "gspo", "cispo")
"""Estimators that `--grpo-std-normalization` is about."""


def algorithm_problems(config: Config, origins: Mapping[str, str]) -> list[str]:
    """Contradictions among the flags of the algorithm.

    Args:
      origins: of `Resolved`: tells what somebody chose. A file doesn't: that of a run holds every default.
    """
    given = {name for name, origin in origins.items() if origin == COMMAND_LINE}
    return (
        _estimator_problems(config, given)
        + _clip_problems(config)
        + _kl_problems(config, given)
        + _correction_problems(config, given)
    )


def algorithm_warnings(config: Config) -> list[str]:
    """What can be run but is seldom meant."""
    train, estimator = config.train, config.reward.advantage_estimator
    warnings = []
    if estimator == "cispo" and train.eps_clip < 1:
        warnings.append(
            f"--advantage-estimator cispo with --eps-clip {train.eps_clip:g} bounds the ratio below too; "
            "the paper doesn't: --eps-clip 1"
        )
    if estimator == "gspo" and train.calculate_per_token_loss:
        warnings.append(
            "--advantage-estimator gspo with --calculate-per-token-loss weighs a sequence by its length; "
            "the paper's objective is the mean over sequences"
        )
    if train.use_kl_loss and train.kl_loss_coef == 0:
        warnings.append("--use-kl-loss with --kl-loss-coef 0: the KL to the reference is measured and not trained on")
    elif train.use_kl_loss and train.kl_estimator == "k1":
        warnings.append(
            "--use-kl-loss with --kl-loss-type k1: its gradient doesn't depend on the reference; "
            "use k2, k3 or low_var_kl"
        )
    return warnings


def _estimator_problems(config: Config, given: set[str]) -> list[str]:
    train, estimator = config.train, config.reward.advantage_estimator
    flag = f"--advantage-estimator {estimator}"
    problems = []
    if estimator == "dr_grpo" and train.calculate_per_token_loss:
        problems.append(f"{flag} divides by a constant: leave --calculate-per-token-loss out")
    if estimator in WHITENED and not train.normalize_advantages:
        problems.append(f"{flag} is defined by whitening over the batch: add --normalize-advantages")
    custom = config.reward.agentic_custom_advantage_path is not None
    if estimator == "rloo" and custom:
        problems.append(f"{flag}: credit comes from --agentic-custom-advantage-path; leave one of the two out")
    elif estimator == "rloo" and config.rollout.n_samples_per_prompt == 1:
        problems.append(f"{flag} takes the mean of the Group's other Sessions: raise --n-samples-per-prompt above 1")
    chose_std = "grpo_std_normalization" in given and config.reward.grpo_std_normalization
    if chose_std and estimator not in DIVIDES_BY_STD:
        problems.append(f"--grpo-std-normalization: {flag} doesn't divide by the standard deviation")
    if train.normalize_advantages and config.rollout.fully_async and train.num_iters_per_train_update > 1:
        problems.append(
            f"--normalize-advantages needs all of an optimizer batch at once, --num-iters-per-train-update "
            f"{train.num_iters_per_train_update} takes it in parts: set it to 1"
        )
    return problems


def _clip_problems(config: Config) -> list[str]:
    train = config.train
    if config.reward.advantage_estimator == "cispo" and train.eps_clip_c is not None:
        return ["--eps-clip-c: --advantage-estimator cispo has no dual clip"]
    return []


def _kl_problems(config: Config, given: set[str]) -> list[str]:
    train, estimator = config.train, config.reward.advantage_estimator
    problems = []
    if train.kl_coef and estimator not in WHITENED:
        problems.append(
            f"--kl-coef shapes the returns of {' and '.join(WHITENED)}; with --advantage-estimator {estimator} use "
            "--use-kl-loss --kl-loss-coef"
        )
    if train.kl_coef and train.kl_loss_coef:
        problems.append("--kl-coef and --kl-loss-coef: choose one place for the KL, returns or loss")
    if train.kl_loss_coef and not train.use_kl_loss:
        problems.append("--kl-loss-coef is given without --use-kl-loss")
    if train.use_unbiased_kl and not train.use_kl_loss:
        problems.append("--use-unbiased-kl is given without --use-kl-loss")
    if not train.needs_reference:
        unused = [
            flag for flag, value in (("--kl-loss-type", train.kl_loss_type), ("--ref-load", train.ref_load)) if value
        ]
        problems += [f"{flag} is given without --use-kl-loss or --kl-coef: nothing is compared" for flag in unused]
    elif train.ref_load is not None:
        problems += reference_problems(train.ref_load)
    return problems


def _correction_problems(config: Config, given: set[str]) -> list[str]:
    train = config.train
    problems = []
    if train.use_tis and train.use_mis:
        problems.append("--use-tis and --use-mis exclude each other: truncate ratios or mask them")
    if train.corrects_gap and train.use_rollout_logprobs:
        problems.append(
            f"{'--use-tis' if train.use_tis else '--use-mis'} corrects the gap between the engine's logprobs and the "
            "trainer's; with --use-rollout-logprobs there is none"
        )
    if train.corrects_gap and not train.tis_clip_low <= 1 <= train.tis_clip:
        problems.append(
            f"--tis-clip-low {train.tis_clip_low:g} and --tis-clip {train.tis_clip:g} must have 1, the ratio without a "
            "gap, between them"
        )
    if not train.corrects_gap:
        unused = [
            flag for flag, name in (("--tis-clip", "tis_clip"), ("--tis-clip-low", "tis_clip_low")) if name in given
        ]
        problems += [f"{flag} is given without --use-tis or --use-mis" for flag in unused]
    if "opsm_delta" in given and not train.use_opsm:
        problems.append("--opsm-delta is given without --use-opsm")
    return problems
