"""Drawing one token for each row of a logits matrix: pure tensor functions.

Owns temperature, top-k, top-p, the counter-based randomness and the logprob that is recorded. Not covered: stop rules
(rows.py) and where logits come from (model.py).
"""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@frozen(kw_only=True)
class Draw:
    """How each of B rows draws its token; all arrays have length B.

    Attributes:
      temperature: float32; 0 is greedy.
      top_p: float32 in (0, 1].
      top_k: int64; -1 is all.
      seed: uint64.
      position: int64, absolute index of the token to be drawn.
    """

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    seed: NDArray[np.uint64]
    position: NDArray[np.int64]


def uniforms(seed: NDArray[np.uint64], position: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1 - 2**-40] for each row, a function of its seed and position only.

    Counter-based on purpose: nothing has to be carried along to resume an attempt, and rows don't share a stream.
    """
    mixed = _mix(seed ^ _mix(position.astype(np.uint64) * _GOLDEN + _GOLDEN))
    # 40 bits: times a float64 total near 1 the product stays below the total, so that a draw always falls inside.
    return (mixed >> np.uint64(24)).astype(np.float64) * 2.0**-40


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every input bit changes half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def sample(logits: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row.

    A row's token is found by inverting its cumulative distribution in the order of token ids at its uniform number.

    Args:
      logits: (B, V) float32.
      draw: parameters of the B rows.

    Returns:
      ids (B,) int64 and logprobs (B,) float32: natural log of the probability of each id in the distribution that was
      sampled from; for greedy rows in the plain softmax of the logits. A row whose logits are not finite has a logprob
      that is not finite.
    """
    log_probs = sampling_log_probs(logits, draw)
    greedy = draw.temperature == 0.0
    if greedy.all():
        ids = logits.argmax(dim=-1)
    else:
        ids = _invert(log_probs, _on(uniforms(draw.seed, draw.position), logits))
        if greedy.any():
            ids = torch.where(_on(greedy, logits), logits.argmax(dim=-1), ids)
    return ids, log_probs.gather(1, ids[:, None]).squeeze(1)


def sampling_log_probs(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Log of the distribution each row samples from: (B, V) float32, -inf where top-k or top-p cut.

    Greedy rows get the plain softmax of their logits.
    """
    greedy = draw.temperature == 0.0
    if (draw.temperature[~greedy] != 1.0).any():
        scale = np.where(greedy, np.float32(1.0), draw.temperature)
        logits = logits / _on(scale, logits)[:, None]
    vocab_len = logits.shape[1]
    top_k = np.where(greedy | (draw.top_k <= 0) | (draw.top_k > vocab_len), vocab_len, draw.top_k)
    top_p = np.where(greedy, np.float32(1.0), draw.top_p)
    if (top_k < vocab_len).any() or (top_p < 1.0).any():
        logits = _cut(logits, _on(top_k, logits), _on(top_p, logits))
    return torch.log_softmax(logits, dim=-1)


def _cut(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set to -inf what is not among the k likeliest, then what is outside the nucleus of those. The likeliest stays."""
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    ordered = ordered.masked_fill(rank[None, :] >= top_k[:, None], -torch.inf)
    probs = torch.softmax(ordered, dim=-1, dtype=torch.float64)
    before = probs.cumsum(dim=-1) - probs
    whole = (top_p >= 1.0)[:, None]
    outside = (before >= top_p.to(torch.float64)[:, None]) & ~whole
    outside[:, 0] = False
    cut = torch.empty_like(logits)
    return cut.scatter_(1, order, ordered.masked_fill(outside, -torch.inf))


def _invert(log_probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first id whose cumulative probability exceeds the row's uniform number, (B,) int64."""
    # float64: in float32 the tail of a large vocabulary would vanish in the sum.
    cumulative = log_probs.exp().to(torch.float64).cumsum(dim=-1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
    return ids.clamp_max(log_probs.shape[1] - 1)


def _on(values: NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)
