"""Logprobs and entropies by chunks of logits: the values and gradients of the formulas over full logits."""

from __future__ import annotations

import pytest
import torch
from builders_train import tiny_model
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM

from relax_trio.config.tree import RolloutConfig
from relax_trio.train.head import Distribution, Head, find_head

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_torch_thread")]

K, H, V = 13, 8, 31


def inputs(*, bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    linear = torch.nn.Linear(H, V, bias=bias, dtype=dtype)
    hidden = torch.randn(K, H, dtype=dtype, requires_grad=True)
    recorded = torch.randint(0, V, (K,))
    return linear, hidden, recorded


def gradients(values, linear, hidden):
    """Of a fixed sum of logprobs and entropies, with respect to hidden states, weight and bias."""
    generator = torch.Generator().manual_seed(1)
    total = sum((v * torch.randn(K, generator=generator, dtype=v.dtype)).sum() for v in values if v is not None)
    leaves = [hidden, *linear.parameters()]
    return torch.autograd.grad(total, leaves)


def full(linear, hidden, recorded, distribution, *, scale, softcap):
    """The definition, by autograd over (K, V)."""
    logits = linear(hidden) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_probs = distribution.log_softmax(logits, recorded)
    finite = log_probs.masked_fill(log_probs.isinf(), 0.0)
    entropy = -(log_probs.exp() * finite).sum(-1)
    return log_probs.gather(1, recorded[:, None])[:, 0], entropy


@pytest.mark.parametrize("chunk", [1, 3 * V, 1000 * V])
@pytest.mark.parametrize(
    "distribution",
    [Distribution(), Distribution(temperature=0.6), Distribution(temperature=1.3, top_p=0.7), Distribution(top_k=4)],
    ids=str,
)
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (1.0, 2.0), (3.0, 1.5)])
def test_values_and_gradients_are_those_over_full_logits(chunk, distribution, scale, softcap):
    linear, hidden, recorded = inputs()
    head = Head(linear=linear, scale=scale, softcap=softcap)
    found = head.score(hidden, recorded, distribution, chunk_elements=chunk)
    expected = full(linear, hidden, recorded, distribution, scale=scale, softcap=softcap)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    for used in ((0, 1), (0,), (1,)):
        parts = [[v if i in used else None for i, v in enumerate(values)] for values in (found, expected)]
        got, wanted = (
            torch.autograd.grad(
                sum(
                    (v * (i + 1) * torch.linspace(-1, 2, K, dtype=v.dtype)).sum()
                    for i, v in enumerate(p)
                    if v is not None
                ),
                [hidden, *linear.parameters()],
                retain_graph=True,
            )
            for p in parts
        )
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_a_frozen_head_without_bias_passes_gradients_through():
    linear, hidden, recorded = inputs(bias=False)
    linear.requires_grad_(False)
    logprobs, _ = Head(linear=linear).score(hidden, recorded, Distribution(), chunk_elements=V)
    (got,) = torch.autograd.grad(logprobs.sum(), [hidden])
    expected = full(linear, hidden, recorded, Distribution(), scale=1.0, softcap=None)[0]
    torch.testing.assert_close(got, torch.autograd.grad(expected.sum(), [hidden])[0])


def test_no_rows_have_no_scores_and_no_gradient():
    linear, hidden, recorded = inputs()
    logprobs, entropy = Head(linear=linear).score(hidden[:0], recorded[:0], Distribution(), chunk_elements=V)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert not linear.weight.grad.any()


def test_no_more_logits_than_a_chunk_are_alive(monkeypatch):
    """Neither in the forward pass nor in the backward pass does a tensor of all logits come to be."""
    largest = [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, tuple | list) else (out,):
                if isinstance(value, torch.Tensor):
                    largest[0] = max(largest[0], value.numel())
            return out

    linear = torch.nn.Linear(2, V)
    hidden = torch.randn(400, 2, requires_grad=True)
    recorded = torch.randint(0, V, (400,))
    with Watch():
        logprobs, _ = Head(linear=linear).score(hidden, recorded, Distribution(), chunk_elements=5 * V)
        logprobs.sum().backward()
    assert largest[0] <= 800, "hidden states are the largest tensor; full logits would have 12,400 elements"


@pytest.mark.parametrize("kind", ["plain", "softcap", "divided", "multiplied"])
def test_what_a_model_does_to_its_logits_is_found(kind):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": V,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    if kind == "divided":
        model = GraniteForCausalLM(GraniteConfig(**sizes, logits_scaling=8.0))
    elif kind == "multiplied":
        model = CohereForCausalLM(CohereConfig(**sizes, logit_scale=0.125))
    else:
        model = tiny_model("gemma2" if kind == "softcap" else "llama")
    body, head = find_head(model.eval())
    assert body is model.model
    expected = {"plain": (1.0, None), "softcap": (1.0, 0.5), "divided": (0.125, None), "multiplied": (0.125, None)}
    assert (head.scale, head.softcap) == expected[kind]


def test_a_model_that_changes_its_logits_in_its_own_way_has_no_head():
    model = tiny_model("llama")
    forward = model.forward

    def shifted(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits + torch.arange(out.logits.shape[-1])
        return out

    model.forward = shifted
    assert find_head(model) is None


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"top_p": 0.6}, [0, 1]),  # the token that crosses the mass is one of the nucleus
        ({"top_p": 0.45}, [0]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.8}, [0, 1]),  # of what top-k leaves, 5/9 and 8/9
        ({}, [0, 1, 2, 3]),
    ],
)
@pytest.mark.parametrize("recorded", [0, 3])
def test_the_support_is_what_rollout_sampled_from_and_the_recorded_token(limits, kept, recorded):
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.1 - 1e-9]], dtype=torch.float64).log()
    found = Distribution(**limits).log_softmax(logits, torch.tensor([recorded]))[0]
    assert found.isfinite().nonzero()[:, 0].tolist() == sorted({*kept, recorded})


def test_greedy_rollout_records_the_plain_softmax():
    greedy = RolloutConfig(rollout_temperature=0.0, rollout_top_p=0.5, rollout_top_k=3)
    assert Distribution.of_rollout(greedy) == Distribution()
    warm = RolloutConfig(rollout_temperature=0.7, rollout_top_p=0.5, rollout_top_k=3)
    assert Distribution.of_rollout(warm) == Distribution(temperature=0.7, top_p=0.5, top_k=3)
