"""The sections of the configuration that learning is made of: reward and credit, loss and optimizer.

Part of the tree (tree.py), which re-exports its names.
"""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from relax_trio.config.option import above_one, not_negative, option, positive

ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gspo", "cispo")
"""What `--advantage-estimator` takes."""


@frozen(kw_only=True)
class RewardConfig:
    """Reward and credit."""

    custom_rm_path: str | None = option(None, "Reward hook package.module.function.", metavar="PATH")
    group_rm: bool = option(False, "The reward hook is given a whole Group: rm(args, samples) returns a list.")
    agentic_custom_advantage_path: str | None = option(
        None, "Hook that gives every exported context its credit, package.module.function.", metavar="PATH"
    )
    dynamic_sampling_filter_path: str | None = option(
        None,
        "Hook keep(args, samples) that says which Groups are trained on; "
        "relax_trio.reward.filters.check_reward_nonzero_std drops those of equal rewards.",
        metavar="PATH",
    )
    log_passrate: bool = option(False, "Log pass@k over Sessions: a primary reward of 1 is a pass.")
    reward_key: str | None = option(None, "Key of the primary reward in a reward object.", metavar="KEY")
    rm_concurrency: int = option(64, "Reward hook calls in flight at once.", check=positive)
    rm_timeout: float = option(600.0, "Time limit of one reward hook call.", unit="s", check=positive)
    advantage_estimator: str = option(
        "grpo",
        "How rewards become credit, and credit a loss; see docs/algorithms.md.",
        metavar="NAME",
        choices=ESTIMATORS,
    )
    grpo_std_normalization: bool = option(True, "Divide the centred reward by the Group's standard deviation.")


@frozen(kw_only=True)
class TrainConfig:
    """Loss, optimizer and checkpoints."""

    lr: float = option(1e-6, "Learning rate.", check=not_negative)
    lr_warmup_iters: int = option(0, "Optimizer steps of linear warm-up.", check=not_negative)
    lr_decay_style: str = option(
        "constant", "Learning-rate schedule after warm-up.", choices=("constant", "linear", "cosine")
    )
    weight_decay: float = option(0.0, "AdamW weight decay.", check=not_negative)
    adam_beta1: float = option(0.9, "AdamW beta 1.")
    adam_beta2: float = option(0.95, "AdamW beta 2.")
    adam_eps: float = option(1e-8, "AdamW epsilon.")
    clip_grad: float = option(1.0, "Largest gradient norm; 0 turns clipping off.", check=not_negative)
    eps_clip: float = option(0.2, "Policy ratio clip, lower side.", check=positive)
    eps_clip_high: float | None = option(None, "Policy ratio clip, upper side; default: --eps-clip.", check=positive)
    eps_clip_c: float | None = option(
        None, "Dual clip: bound of the ratio where the advantage is negative; default: none.", check=above_one
    )
    normalize_advantages: bool = option(
        False, "Whiten advantages over the trained tokens of each optimizer batch: mean 0, variance 1."
    )
    entropy_coef: float = option(0.0, "Coefficient of the entropy bonus.", check=not_negative)
    kl_coef: float = option(
        0.0, "Coefficient of the KL to the reference in the returns of REINFORCE++.", check=not_negative
    )
    use_kl_loss: bool = option(False, "Add the KL to the reference to the loss.")
    kl_loss_coef: float = option(0.0, "Coefficient of --use-kl-loss; 0 measures only.", check=not_negative)
    kl_loss_type: str | None = option(
        None,
        "Estimator of the KL, in the loss and in returns; default: low_var_kl in the loss, k1 in returns.",
        choices=("k1", "k2", "k3", "low_var_kl"),
    )
    use_unbiased_kl: bool = option(
        False, "Weigh each token's KL in the loss by the ratio of new to old probability, as DeepSeek-V3.2 does."
    )
    ref_load: Path | None = option(
        None, "Checkpoint directory of the reference model, or demo; default: --hf-checkpoint.", metavar="DIR"
    )
    use_rollout_logprobs: bool | None = option(
        None,
        "The old policy's logprobs are the engine's; else the trainer's own before the optimizer phase. "
        "Default: yes, unless --use-tis or --use-mis corrects the gap between the two.",
    )
    use_tis: bool = option(False, "Truncated importance sampling for the gap between engine and trainer.")
    use_mis: bool = option(False, "Masked importance sampling for it: tokens with a ratio out of bounds are left out.")
    tis_clip: float = option(2.0, "Upper bound of the ratio in --use-tis and --use-mis.", check=positive)
    tis_clip_low: float = option(0.0, "Lower bound of the ratio in --use-tis and --use-mis.", check=not_negative)
    use_opsm: bool = option(
        False, "Off-policy sequence masking: leave out Sessions of negative advantage that the policy has left."
    )
    opsm_delta: float = option(
        1e-4, "Mean KL to the rollout above which --use-opsm leaves a Session out.", unit="nats", check=not_negative
    )
    global_batch_size: int | None = option(
        None,
        "Samples per optimizer step; default: all samples of a rollout step.",
        unit="samples",
        check=positive,
    )
    num_iters_per_train_update: int = option(
        1,
        "Fully async: an optimizer step takes its Sessions in so many batches, each as soon as it is there.",
        check=positive,
    )
    micro_batch_size: int = option(8, "Samples per forward pass.", unit="samples", check=positive)
    use_dynamic_batch_size: bool = option(
        False,
        "Forward passes take rows without padding up to --max-tokens-per-gpu instead of --micro-batch-size samples.",
    )
    max_tokens_per_gpu: int | None = option(
        None,
        "Tokens per forward pass with --use-dynamic-batch-size; a longer row has one to itself.",
        unit="tokens",
        check=positive,
    )
    lora_rank: int | None = option(
        None, "Train low-rank adapters of this rank instead of the weights; needs relax-trio[lora].", check=positive
    )
    lora_alpha: float | None = option(
        None, "The adapter counts alpha / rank times; default: twice the rank.", check=positive
    )
    lora_target_modules: tuple[str, ...] = option(
        ("all-linear",), "Layers that get an adapter, by the end of their names; all-linear: every one.", metavar="NAME"
    )
    trainer_processes: int = option(
        0,
        "Train in so many processes, each with a GPU of its own where there are any, the weights sharded among them by "
        "FSDP2; 0: in this process.",
        unit="processes",
        check=not_negative,
    )
    gradient_checkpointing: bool = option(
        False, "Keep only the inputs of layers for the backward pass: less memory, about a third more time."
    )
    train_dtype: str = option(
        "float32",
        "Forward and backward passes; weights, gradients and optimizer are float32 always.",
        choices=("float32", "bfloat16"),
    )
    attn_implementation: str = option(
        "auto",
        "Attention in training; auto: FlashAttention where it is installed and --train-dtype is bfloat16, else SDPA.",
        choices=("auto", "sdpa", "flash_attention_2"),
    )
    calculate_per_token_loss: bool = option(False, "Mean over tokens instead of mean over Sessions.")
    seed: int = option(1234, "Seed of Python's, NumPy's and torch's global generators, for hooks and model code.")
    save: Path | None = option(None, "Directory of checkpoints; default: RUN_DIR/checkpoints.", metavar="DIR")
    save_interval: int | None = option(
        None, "Steps between checkpoints; default: only the last.", unit="steps", check=positive
    )
    save_keep_last: int | None = option(
        None, "Checkpoints that are kept, the newest ones; default: all.", unit="checkpoints", check=positive
    )
    load: Path | None = option(None, "Resume from this directory of checkpoints.", metavar="DIR")

    @property
    def upper_clip(self) -> float:
        """`eps_clip_high`, or `eps_clip`."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def corrects_gap(self) -> bool:
        """Whether importance sampling corrects the gap between engine and trainer."""
        return self.use_tis or self.use_mis

    @property
    def takes_rollout_logprobs(self) -> bool:
        """`use_rollout_logprobs`, or True unless the gap is corrected."""
        return not self.corrects_gap if self.use_rollout_logprobs is None else self.use_rollout_logprobs

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is asked for its logprobs."""
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def kl_estimator(self) -> str:
        """`kl_loss_type`, or low_var_kl with `use_kl_loss`, k1 without."""
        return self.kl_loss_type or ("low_var_kl" if self.use_kl_loss else "k1")

    @property
    def lora_alpha_or_default(self) -> float:
        """`lora_alpha`, or 2 * lora_rank."""
        return self.lora_alpha if self.lora_alpha is not None else 2.0 * (self.lora_rank or 0)
