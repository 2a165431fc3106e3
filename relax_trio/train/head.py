"""From hidden states to the logprobs and entropies of recorded tokens, a chunk of logits at a time.

Full logits are the largest tensor of training: 150 k floats a token. Here a chunk of them lives at once, in the forward
pass and again in the backward pass, which computes it anew. Gradients are exact. Not covered: heads that are no linear
layer, and what a model does to its logits beyond scaling and capping; such a model is used as a whole (policy.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attrs import frozen

from relax_trio.config.tree import RolloutConfig

CHUNK_ELEMENTS = 1 << 24
"""Logits alive at once, in elements: 64 MiB of float32, about 110 positions of a 150 k vocabulary."""


@frozen(kw_only=True)
class Distribution:
    """The distribution that rollout sampled from, so that training takes logprobs of the same one.

    Attributes:
      temperature: logits are divided by it; more than 0.
      top_p: nucleus mass, 1.0: all.
      top_k: k likeliest tokens, -1: all.
      forbidden_ids: tokens that are never generated.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    forbidden_ids: tuple[int, ...] = ()

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
        outside = self.outside(scaled.detach(), recorded)
        if outside is not None:
            scaled = scaled.masked_fill(outside, float("-inf"))
        return scaled.log_softmax(dim=-1)

    def outside(self, scaled: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor | None:
        """(K, V) bool, True off the support of logits divided by the temperature; None where all are on it."""
        forbidden = None
        if self.forbidden_ids:
            forbidden = torch.zeros(scaled.shape[-1], dtype=torch.bool, device=scaled.device)
            forbidden[list(self.forbidden_ids)] = True
        if self.top_p >= 1.0 and not 0 < self.top_k < scaled.shape[-1]:
            return None if forbidden is None else forbidden.expand_as(scaled)
        allowed = scaled if forbidden is None else scaled.masked_fill(forbidden, float("-inf"))
        return ~self._support(allowed, recorded)

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


@frozen(kw_only=True, eq=False)
class Head:
    """What makes logits of hidden states: y = scale * (W h + b), capped as c * tanh(y / c) where there is a c.

    Attributes:
      linear: W and b.
      scale: Granite divides its logits by a number, Cohere multiplies them by one.
      softcap: the c of Gemma.
    """

    linear: torch.nn.Linear
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(K, V) of (K, H)."""
        return self.finish(self.linear(hidden))

    def finish(self, raw: torch.Tensor) -> torch.Tensor:
        """Scale and cap the linear layer's output."""
        if self.scale != 1.0:
            raw = raw * self.scale
        return raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)

    def score(
        self, hidden: torch.Tensor, recorded: torch.Tensor, distribution: Distribution, *, chunk_elements: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob of each recorded token and entropy of its distribution, both differentiable.

        Args:
          hidden: (K, H) float; K may be 0.
          recorded: (K,) int64.
          distribution: what the logprobs are of.
          chunk_elements: logits alive at once.

        Returns:
          (logprobs, entropy in nats), each (K,) float32, or float64 if `hidden` is.
        """
        scored: tuple[torch.Tensor, torch.Tensor] = _Score.apply(  # type: ignore[no-untyped-call]  # torch has no types for it
            hidden, self.linear.weight, self.linear.bias, recorded, distribution, self, chunk_elements
        )
        return scored


class _Score(torch.autograd.Function):
    """`Head.score`. With p the softmax of the tempered logits z and H its entropy:

    d logp_r / d z = onehot(r) - p,  d H / d z = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        recorded: torch.Tensor,
        distribution: Distribution,
        head: Head,
        chunk_elements: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = hidden.device.type
        compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.head, ctx.distribution, ctx.compute = head, distribution, compute
        ctx.rows = max(1, chunk_elements // weight.shape[0])
        ctx.set_materialize_grads(False)
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(len(recorded), dtype=exact, device=hidden.device)
        entropy, log_sums = torch.empty_like(logprobs), torch.empty_like(logprobs)
        w, b = _cast(weight, bias, compute)
        for part in _parts(len(recorded), ctx.rows):
            z, _ = _tempered(hidden[part].to(compute), w, b, recorded[part], head, distribution)  # (k, V)
            log_sums[part] = z.logsumexp(dim=-1)
            logprobs[part] = z.gather(1, recorded[part, None])[:, 0] - log_sums[part]
            p = (z - log_sums[part, None]).exp_()
            entropy[part] = log_sums[part] - p.mul_(z).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, bias, recorded, log_sums, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, recorded, log_sums, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = grads
        head: Head = ctx.head
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight) if needs_weight else None
        d_bias = torch.zeros_like(bias) if needs_bias else None
        w, b = _cast(weight, bias, ctx.compute)
        for part in _parts(len(recorded), ctx.rows):
            h = hidden[part].to(ctx.compute)
            z, slope = _tempered(h, w, b, recorded[part], head, ctx.distribution, with_slope=True)
            log_p = z.sub_(log_sums[part, None])
            p = log_p.exp()
            if of_entropy is None:
                assert of_logprobs is not None, "autograd asks for some gradient"
                d = p.mul_(-of_logprobs[part, None])
            else:
                d = log_p.add_(entropy[part, None]).mul_(-of_entropy[part, None])
                if of_logprobs is not None:
                    d.sub_(of_logprobs[part, None])
                d.mul_(p)
            if of_logprobs is not None:
                d.scatter_add_(1, recorded[part, None], of_logprobs[part, None])
            d.mul_(head.scale / ctx.distribution.temperature)
            if slope is not None:
                d.mul_(slope)
            d = d.to(ctx.compute)
            if d_hidden is not None:
                d_hidden[part] = (d @ w).to(d_hidden.dtype)
            if d_weight is not None:
                _add_product(d_weight, d.t(), h)
            if d_bias is not None:
                d_bias += d.sum(dim=0)
        return d_hidden, d_weight, d_bias, None, None, None, None


def find_head(model: torch.nn.Module) -> tuple[torch.nn.Module, Head] | None:
    """The two halves of a model whose logits are `head.logits(body(ids))`, or None.

    What a model does to its logits after the head is known by the names that configurations give it; but the claim is
    tried on a few tokens instead of believed.
    """
    body = getattr(model, "base_model", None)
    head_of = getattr(model, "get_output_embeddings", None)
    linear = head_of() if callable(head_of) else None
    if not isinstance(body, torch.nn.Module) or body is model or not isinstance(linear, torch.nn.Linear):
        return None
    ids = torch.arange(min(8, linear.out_features), device=linear.weight.device)[None]  # (1, 8)
    with torch.no_grad():
        hidden = getattr(body(input_ids=ids, use_cache=False), "last_hidden_state", None)
        if hidden is None:
            return None
        logits = model(input_ids=ids, use_cache=False).logits
        heads = _candidates(linear, getattr(model, "config", None))
        found = next((h for h in heads if torch.allclose(h.logits(hidden), logits, rtol=1e-4, atol=1e-5)), None)
    return None if found is None else (body, found)


def _candidates(linear: torch.nn.Linear, config: Any) -> Iterator[Head]:
    """The plain head and those that the configuration speaks of."""
    yield Head(linear=linear)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    cap, divisor, factor = (
        getattr(text, name, None) for name in ("final_logit_softcapping", "logits_scaling", "logit_scale")
    )
    if isinstance(cap, int | float) and cap > 0:
        yield Head(linear=linear, softcap=float(cap))
    if isinstance(divisor, int | float) and divisor:
        yield Head(linear=linear, scale=1.0 / divisor)
    if isinstance(factor, int | float):
        yield Head(linear=linear, scale=float(factor))


def _tempered(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recorded: torch.Tensor,
    head: Head,
    distribution: Distribution,
    *,
    with_slope: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits over the temperature, far below all others off the support, and the slope of the cap where there is one.

    Returns:
      (K, V) float32 or float64, memory of its own; (K, V) d capped / d raw, where asked for and not 1 everywhere.
    """
    raw = torch.nn.functional.linear(hidden, weight, bias)
    z = head.finish(raw if raw.dtype == torch.float64 else raw.float())
    slope = None
    if with_slope and head.softcap is not None:
        slope = 1.0 - (z / head.softcap).square()
    if distribution.temperature != 1.0:
        z.div_(distribution.temperature)
    outside = distribution.outside(z, recorded)
    if outside is not None:
        # Finite, so that a probability of 0 times it is 0.
        z.masked_fill_(outside, -1e30)
    return z, slope


def _cast(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _parts(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b to `total`, whose type may be wider."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
