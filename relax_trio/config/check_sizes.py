"""Whether the numbers of the configuration agree with each other."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from relax_trio.config.eval_spec import eval_specs
from relax_trio.config.parse import COMMAND_LINE
from relax_trio.config.tree import Config, RolloutConfig
from relax_trio.errors import ConfigError


def rollout_size_problems(config: Config) -> list[str]:
    """Contradictions among the sizes of rollout."""
    rollout = config.rollout
    problems = []
    over, batch = rollout.over_sampling_batch_size, rollout.rollout_batch_size
    if over is not None and over < batch:
        problems.append(
            f"--over-sampling-batch-size {over} is below --rollout-batch-size {batch}: a step could never fill; "
            "raise the first or lower the second"
        )
    if rollout.deterministic and over is not None and over > batch:
        problems.append(
            f"--deterministic takes no oversampling: --over-sampling-batch-size {over} must equal "
            f"--rollout-batch-size {batch}"
        )
    problems += _lifecycle_problems(rollout)
    if rollout.rollout_top_k != -1 and rollout.rollout_top_k < 1:
        problems.append(f"--rollout-top-k {rollout.rollout_top_k}: must be -1 (all tokens) or at least 1")
    if any(token < 0 for token in rollout.rollout_stop_token_ids):
        problems.append("--rollout-stop-token-ids: a token id is 0 or greater")
    if "" in rollout.rollout_stop:
        problems.append("--rollout-stop: an empty text would stop every turn at once")
    return problems


def _lifecycle_problems(rollout: RolloutConfig) -> list[str]:
    """Ways to keep Groups across steps that don't go together."""
    problems = []
    if rollout.partial_rollout and rollout.fully_async:
        problems.append("--partial-rollout and --fully-async exclude each other: choose one way to keep Groups")
    retains = "--partial-rollout" if rollout.partial_rollout else "--fully-async"
    if rollout.retains_groups and rollout.deterministic:
        problems.append(f"--deterministic can't be had with {retains}: which turns are interrupted depends on timing")
    if rollout.use_dynamic_global_batch_size and not (
        rollout.partial_rollout and rollout.n_work_groups > rollout.rollout_batch_size
    ):
        problems.append(
            "--use-dynamic-global-batch-size needs --partial-rollout and --over-sampling-batch-size above "
            "--rollout-batch-size: only then is there a surplus to train on"
        )
    if rollout.max_staleness is not None and not rollout.fully_async:
        problems.append("--max-staleness is given without --fully-async")
    return problems


def length_problems(config: Config) -> list[str]:
    """Contradictions between the limits of a turn and of a conversation, in rollout and in eval."""
    rollout, evaluation = config.rollout, config.eval
    problems = _length_problem(
        "--rollout-max-context-len",
        rollout.rollout_max_context_len,
        "--rollout-max-response-len",
        rollout.rollout_max_response_len,
    )
    own_context, own_response = evaluation.eval_max_context_len, evaluation.eval_max_response_len
    if evaluation.eval_prompt_data and (own_context is not None or own_response is not None):
        problems += _length_problem(
            "--rollout-max-context-len" if own_context is None else "--eval-max-context-len",
            rollout.rollout_max_context_len if own_context is None else own_context,
            "--rollout-max-response-len" if own_response is None else "--eval-max-response-len",
            rollout.rollout_max_response_len if own_response is None else own_response,
        )
    return problems


def _length_problem(context_flag: str, context_len: int | None, turn_flag: str, turn_len: int) -> list[str]:
    if context_len is None or context_len > turn_len:
        return []
    return [
        f"{context_flag} {context_len} leaves no room for a prompt beside a turn of {turn_flag} {turn_len}: "
        "raise the first or lower the second"
    ]


def train_size_problems(config: Config, origins: Mapping[str, str]) -> list[str]:
    """Contradictions among the sizes and rates of training."""
    train, rollout = config.train, config.rollout
    problems = []
    n_samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    batch = train.global_batch_size
    if batch is not None and n_samples % batch:
        problems.append(
            f"--global-batch-size {batch} does not divide the {n_samples} samples of a step (--rollout-batch-size "
            f"{rollout.rollout_batch_size} x --n-samples-per-prompt {rollout.n_samples_per_prompt})"
        )
    # It is a ceiling for memory; only a size that is asked for here and now can contradict the batch. A run's own
    # configuration file, from which it goes on, has the default in it as any other value.
    chosen = origins.get("micro_batch_size") == COMMAND_LINE
    if batch is not None and chosen and train.micro_batch_size > batch:
        problems.append(
            f"--micro-batch-size {train.micro_batch_size} is above --global-batch-size {batch}: lower the first"
        )
    if train.use_dynamic_batch_size and train.max_tokens_per_gpu is None:
        problems.append("--use-dynamic-batch-size needs --max-tokens-per-gpu: how many tokens a forward pass may hold")
    if train.max_tokens_per_gpu is not None and not train.use_dynamic_batch_size:
        problems.append("--max-tokens-per-gpu is given without --use-dynamic-batch-size")
    if train.lora_rank is not None and importlib.util.find_spec("peft") is None:
        problems.append("--lora-rank needs the package peft: install relax-trio[lora]")
    for flag, wanted, package in (
        ("--use-tensorboard", config.output.use_tensorboard, "tensorboard"),
        ("--use-wandb", config.output.use_wandb, "wandb"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            problems.append(f"{flag} needs the package {package}: install relax-trio[{package}]")
    if train.lora_rank is None and train.lora_alpha is not None:
        problems.append("--lora-alpha is given without --lora-rank")
    if train.attn_implementation == "flash_attention_2" and train.train_dtype != "bfloat16":
        problems.append("--attn-implementation flash_attention_2 works in half precision: set --train-dtype bfloat16")
    for flag, beta in (("--adam-beta1", train.adam_beta1), ("--adam-beta2", train.adam_beta2)):
        if not 0 <= beta < 1:
            problems.append(f"{flag} {beta}: must be 0 or greater and below 1")
    if train.adam_eps <= 0:
        problems.append(f"--adam-eps {train.adam_eps}: must be greater than 0")
    return problems


def train_warnings(config: Config) -> list[str]:
    """Sizes that can be run but teach nothing."""
    warnings = []
    credit_of_group = config.reward.advantage_estimator != "reinforce_plus_plus"
    if config.rollout.n_samples_per_prompt == 1 and credit_of_group:
        warnings.append("--n-samples-per-prompt 1: a Group of one has no spread, so every advantage is 0")
    if config.rollout.rollout_temperature == 0:
        warnings.append("--rollout-temperature 0: the Sessions of a Group sample alike, so advantages vanish")
    return warnings


def eval_problems(config: Config) -> list[str]:
    """What is wrong with the evaluation flags, the datasets' files apart."""
    try:
        names = [spec.name for spec in eval_specs(config)]
    except ConfigError as exc:
        return [str(exc)]
    problems = [
        f"--eval-prompt-data: two datasets are named {name}" for name in sorted(set(names)) if names.count(name) > 1
    ]
    if config.eval.eval_interval is not None and not names:
        problems.append("--eval-interval is given without --eval-prompt-data NAME PATH")
    return problems
