"""What the trainer needs of the configuration, as one value."""

from __future__ import annotations

import torch
from attrs import field, frozen

from relax_trio.config.tree import Config, TrainConfig
from relax_trio.train.policy import Distribution
from relax_trio.train.pretrained import default_device
from relax_trio.train.schedule import learning_rate, n_optimizer_steps


@frozen(kw_only=True)
class TrainerSettings:
    """Loss, optimizer and the distribution that rollout samples from.

    Attributes:
      train: loss, optimizer, schedule.
      distribution: what the rollout logprobs are of.
      deterministic: rows are trained in the order of Groups and Sessions, not of their ending.
      n_total: optimizer steps of the whole run, for a decay; None with the constant schedule.
      device: where the model is trained.
      estimator: `--advantage-estimator`.
      shares_gpu: between phases somebody else needs the GPU's memory, see offload.py.
      context_len: `--rollout-max-context-len`, the longest row; None: as long as the model takes.
      token_budget: tokens that the loss of a Session is divided by with `dr_grpo`.
    """

    train: TrainConfig
    distribution: Distribution = field(factory=Distribution)
    deterministic: bool = False
    n_total: int | None = None
    device: torch.device = field(factory=default_device)
    estimator: str = "grpo"
    token_budget: int = 1024
    context_len: int | None = None
    shares_gpu: bool = False

    def __attrs_post_init__(self) -> None:
        learning_rate(self.train, self.train.lr_warmup_iters, self.n_total)  # refuses a decay without an end

    @property
    def per_token(self) -> bool:
        """Whether tokens weigh alike, whatever Session they are of; with `dr_grpo` too, which divides by a constant."""
        return self.train.calculate_per_token_loss or self.estimator == "dr_grpo"

    @classmethod
    def of_config(cls, config: Config, n_rollout: int | None = None) -> TrainerSettings:
        """Take the settings of a run.

        Args:
          config: the whole configuration.
          n_rollout: rollout steps of the run, if `--num-rollout` left them to the dataset.

        Raises:
          ConfigError: a decaying schedule of a run without an end.
        """
        n_steps = n_rollout if n_rollout is not None else config.rollout.num_rollout
        return cls(
            train=config.train,
            distribution=Distribution.of_rollout(config.rollout),
            deterministic=config.rollout.deterministic,
            n_total=None if n_steps is None else n_optimizer_steps(config.rollout, config.train, n_steps),
            estimator=config.reward.advantage_estimator,
            token_budget=config.rollout.rollout_max_response_len,
            context_len=config.rollout.rollout_max_context_len,
            shares_gpu=config.backend.colocate,
        )
