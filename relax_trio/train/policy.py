"""What a causal LM says about recorded tokens: their logprobs and the entropy at their positions.

Owns the distribution that logprobs are taken of and the saving of work: logits exist only at trained positions, and
only a chunk of them at a time. Knows nothing of losses and optimizers.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch.utils.checkpoint import checkpoint

from relax_trio.config.tree import RolloutConfig
from relax_trio.train.packing import Batch

CHUNK_ELEMENTS = 1 << 26
"""Logits alive at once, in elements: 256 MiB of float32, about 440 positions of a 150 k vocabulary."""


@frozen(kw_only=True)
class Distribution:
    """The distribution that rollout sampled from, so that training takes logprobs of the same one.

    Attributes:
      temperature: logits are divided by it; more than 0.
      top_p: nucleus mass, 1.0: all.
      top_k: k likeliest tokens, -1: all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1

    @classmethod
    def of_rollout(cls, rollout: RolloutConfig) -> Distribution:
        """What the rollout's logprobs are of. Greedy rollout records those of the plain softmax."""
        if rollout.rollout_temperature == 0:
            return cls()
        return cls(temperature=rollout.rollout_temperature, top_p=rollout.rollout_top_p, top_k=rollout.rollout_top_k)

    def log_softmax(self, logits: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
        """Log probabilities of every token.

        Under top-p or top-k the support is that of the current logits and always holds the recorded token: after an
        optimizer step it may have left the nucleus, and log 0 has no gradient.

        Args:
          logits: (K, V) float, raw.
          recorded: (K,) int64.

        Returns:
          (K, V) float32 (float64 if the logits are), -inf outside the support.
        """
        scaled = (logits if logits.dtype == torch.float64 else logits.float()) / self.temperature
        if self.top_p < 1.0 or 0 < self.top_k < scaled.shape[-1]:
            scaled = scaled.masked_fill(~self._support(scaled.detach(), recorded), float("-inf"))
        return scaled.log_softmax(dim=-1)

    def _support(self, scaled: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
        """(K, V) bool: the k likeliest, of those the smallest set whose mass reaches top-p, and the recorded token."""
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        if self.top_k > 0:
            ordered[:, self.top_k :] = float("-inf")
        keep = ordered > float("-inf")
        if self.top_p < 1.0:
            probs = ordered.double().softmax(dim=-1)
            keep &= probs.cumsum(dim=-1) - probs < self.top_p  # mass before the token
        return torch.zeros_like(keep).scatter(1, order, keep).scatter(1, recorded[:, None], True)


class Policy:
    """A causal LM seen through the tokens of a batch.

    The model stays in evaluation mode, in training too: dropout would make the ratio to the rollout policy noise.
    """

    def __init__(self, model: torch.nn.Module, *, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        self.model = model.eval()
        self._chunk_elements = chunk_elements
        self._parts = _body_and_head(model)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def n_vocab(self) -> int:
        """Rows of the input embedding: ids must be below it."""
        embedding = self.model.get_input_embeddings()  # type: ignore[operator]
        return int(embedding.weight.shape[0])

    def score(self, batch: Batch, distribution: Distribution) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob of each trained token and entropy of the distribution it was drawn from.

        Returns:
          (logprobs, entropy), each (K,) in row-major order of `batch.loss_mask`; the entropy in nats, detached.
        """
        ids = batch.ids.to(self.device)  # (B, T)
        picked = batch.loss_mask[:, 1:].to(self.device)  # (B, T-1) position of the logits, one before the token
        recorded = ids[:, 1:][picked]  # (K,)
        if self._parts is None:
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits[picked]  # (K, V)
            return _score(logits, recorded, distribution)
        body, head = self._parts
        hidden = body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[picked]  # (K, H)
        size = max(1, self._chunk_elements // head.out_features)
        if len(recorded) <= size:
            return _score(head(hidden), recorded, distribution)
        parts = [
            checkpoint(_score_hidden, head, some, ids_, distribution, use_reentrant=False)
            for some, ids_ in zip(torch.split(hidden, size), torch.split(recorded, size), strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _score_hidden(
    head: torch.nn.Module, hidden: torch.Tensor, recorded: torch.Tensor, distribution: Distribution
) -> tuple[torch.Tensor, torch.Tensor]:
    return _score(head(hidden), recorded, distribution)


def _score(
    logits: torch.Tensor, recorded: torch.Tensor, distribution: Distribution
) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = distribution.log_softmax(logits, recorded)  # (K, V)
    with torch.no_grad():
        entropy = torch.special.entr(log_probs.exp()).sum(dim=-1)  # (K,); entr(0) = 0
    return log_probs.gather(1, recorded[:, None])[:, 0], entropy


def _body_and_head(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Linear] | None:
    """The two halves of a model whose logits are head(body(ids)), or None.

    Some models scale or cap logits after the head, so the claim is tried on a few tokens instead of believed.
    """
    body = getattr(model, "base_model", None)
    head_of = getattr(model, "get_output_embeddings", None)
    head = head_of() if callable(head_of) else None
    if not isinstance(body, torch.nn.Module) or body is model or not isinstance(head, torch.nn.Linear):
        return None
    ids = torch.arange(min(8, head.out_features), device=head.weight.device)[None]  # (1, 8)
    with torch.no_grad():
        hidden = getattr(body(input_ids=ids, use_cache=False), "last_hidden_state", None)
        if hidden is None:
            return None
        same = torch.allclose(head(hidden), model(input_ids=ids, use_cache=False).logits, rtol=1e-4, atol=1e-5)
    return (body, head) if same else None
