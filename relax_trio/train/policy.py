"""What a causal LM says about recorded tokens: their logprobs and the entropy at their positions.

Owns how a batch goes through the model. Logits exist only at trained positions, and only a chunk of them at a time
(head.py); packed rows see themselves only (attention.py). Knows nothing of losses and optimizers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from attrs import evolve
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from relax_trio.backend.rope import constant_rope_len
from relax_trio.config.tree import TrainConfig
from relax_trio.errors import ConfigError
from relax_trio.train.attention import Attention, is_flash, row_kwargs, set_attention
from relax_trio.train.head import CHUNK_ELEMENTS, Distribution, Head, find_head
from relax_trio.train.images import ImageInputs
from relax_trio.train.packing import Batch

__all__ = ["Distribution", "Policy", "make_policy"]


class Policy:
    """A causal LM seen through the tokens of a batch.

    The model stays in evaluation mode, in training too: dropout would make the ratio to the rollout policy noise.

    Attributes:
      model: the causal LM; its attention is changed to one that gives the same numbers.
      rope_len: longest row for which positions mean the same in every batch, see `backend.rope`; None: any.
      packs: whether rows may stand one after the other in a batch.
      scorer: the module whose forward pass a score is.
      images: how images enter the model; None: its rows have none.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        attention: Attention = "auto",
        half: bool = False,
        recompute_layers: bool = False,
        chunk_elements: int = CHUNK_ELEMENTS,
        images: ImageInputs | None = None,
    ) -> None:
        """Take over a model.

        Args:
          model: its weights stay in the type they have.
          attention: see `attention.set_attention`.
          half: forward and backward passes in bfloat16 where autocast finds that safe; gradients as the weights.
          recompute_layers: keep only the inputs of layers for the backward pass.
          chunk_elements: logits alive at once, in elements.
          images: how images enter it, where it takes some.

        Raises:
          ConfigError: the model's layers can't be recomputed one by one, or FlashAttention isn't there.
        """
        self.model = model.eval()
        self.packs = set_attention(model, attention if half else _exact(attention))
        self._half = half
        self.rope_len = constant_rope_len(model.config)
        self.images = images
        self.scorer = _Scorer(model, find_head(model), chunk_elements)
        if recompute_layers:
            _recompute(model)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def n_vocab(self) -> int:
        """Rows of the input embedding: ids must be below it."""
        hugging_face: Any = self.model
        return int(hugging_face.get_input_embeddings().weight.shape[0])

    def score(self, batch: Batch, distribution: Distribution) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob of each trained token and entropy of the distribution it was drawn from.

        Returns:
          (logprobs, entropy), each (K,) in row-major order of `batch.loss_mask`, differentiable; the entropy in nats.
        """
        assert self.packs or not batch.is_packed, "rows of this model can't be packed"
        device = self.device
        ids = batch.ids.to(device)  # (B, T)
        picked = batch.loss_mask[:, 1:].to(device)  # (B, T-1) position of the logits, one before the token
        kwargs: dict[str, Any] = {}
        if batch.is_packed:
            # The last token is no input; it is the last of the last row.
            lens = (*batch.row_lens[:-1], batch.row_lens[-1] - 1)
            kwargs = {"position_ids": batch.positions[:, :-1].to(device), **row_kwargs(lens, device)}
        if self.images is not None:
            distribution = evolve(distribution, forbidden_ids=self.images.forbidden_ids)
            kwargs |= self.images.of(ids[:, :-1], batch.images or [()] * len(batch.ids))
        with self._precision(device):
            scored: tuple[torch.Tensor, torch.Tensor] = self.scorer(
                ids[:, :-1], picked, ids[:, 1:][picked], distribution, kwargs
            )
        return scored

    def _precision(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.autocast(device.type, torch.bfloat16) if self._half or is_flash(self.model) else nullcontext()


def make_policy(
    model: torch.nn.Module, train: TrainConfig, images: ImageInputs | None = None, *, context_len: int | None = None
) -> Policy:
    """The policy that the flags of training ask for.

    Args:
      images: how images enter the model, where it takes some.
      context_len: the longest row that it has to score; None: as long as the model takes.

    Raises:
      ConfigError: see `Policy`; or such a row's positions would mean something else in another batch.
    """
    attention: Any = train.attn_implementation  # its choices are those of the type
    policy = Policy(
        model,
        attention=attention,
        half=train.train_dtype == "bfloat16",
        recompute_layers=train.gradient_checkpointing,
        images=images,
    )
    _require_constant_rope(policy, context_len)
    return policy


def _require_constant_rope(policy: Policy, context_len: int | None) -> None:
    if policy.rope_len is None:
        return
    hugging_face: Any = policy.model
    longest = context_len or hugging_face.config.get_text_config().max_position_embeddings
    if longest > policy.rope_len:
        raise ConfigError(
            f"this model's rotary embeddings change with the length of what it reads beyond {policy.rope_len} tokens, "
            "so that a row would depend on which others are in its batch; set --rollout-max-context-len to "
            f"{policy.rope_len} or less"
        )


class _Scorer(torch.nn.Module):
    """The forward pass of a score as one module, so that whoever shards weights sees all uses of them inside it."""

    def __init__(
        self, model: torch.nn.Module, halves: tuple[torch.nn.Module, Head] | None, chunk_elements: int
    ) -> None:
        super().__init__()
        self.model = model
        # A plain tuple, so that the body isn't registered a second time.
        self._halves = halves
        self._chunk_elements = chunk_elements

    def forward(
        self,
        ids: torch.Tensor,
        picked: torch.Tensor,
        recorded: torch.Tensor,
        distribution: Distribution,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score (B, T) `ids` at `picked` (B, T), where the next tokens are `recorded` (K,)."""
        if self._halves is None:
            logits = self.model(input_ids=ids, use_cache=False, **kwargs).logits[picked]  # (K, V)
            return _score_logits(logits, recorded, distribution)
        body, head = self._halves
        hidden = body(input_ids=ids, use_cache=False, **kwargs).last_hidden_state[picked]  # (K, H)
        return head.score(hidden, recorded, distribution, chunk_elements=self._chunk_elements)


def _score_logits(
    logits: torch.Tensor, recorded: torch.Tensor, distribution: Distribution
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from logits, for a model whose head isn't known."""
    log_probs = distribution.log_softmax(logits, recorded)  # (K, V)
    finite = log_probs.clamp(min=-1e30)  # off the support a probability of 0 has to make it 0
    entropy = -(finite.exp() * finite).sum(dim=-1)  # (K,)
    return log_probs.gather(1, recorded[:, None])[:, 0], entropy


def _exact(attention: Attention) -> Attention:
    """FlashAttention works in half precision: in full precision it isn't chosen unasked."""
    return "sdpa" if attention == "auto" else attention


def _recompute(model: torch.nn.Module) -> None:
    """Have each layer compute its inside anew in the backward pass.

    Not by transformers' own switch: that one needs training mode, and with it comes dropout.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError("--gradient-checkpointing: this model doesn't say what its layers are; leave the flag out")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
