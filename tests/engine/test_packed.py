"""Rows without padding: every row comes out as it does alone, in logprobs, gradients and bookkeeping."""

from __future__ import annotations

import copy

import pytest
import torch
from attrs import evolve
from builders_train import (
    CPU,
    VOCAB,
    flat_gradient,
    make_sample,
    off_policy,
    relative,
    rollout,
    same_tensors,
    tiny_model,
)
from builders_train import settings as builders_settings
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from relax_trio.errors import ConfigError
from relax_trio.train.attention import PACKED, set_attention
from relax_trio.train.packing import MicroBatching, micro_batches
from relax_trio.train.phase import run_phase
from relax_trio.train.policy import Distribution, Policy
from relax_trio.train.update import Updater

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_torch_thread")]

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def windowed(kind):
    torch.manual_seed(3)
    if kind == "mistral":
        model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4))
    else:
        types = ["full_attention", "sliding_attention"]
        config = Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=4, layer_types=types)
        model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def packed(samples, budget=60):
    return micro_batches(samples, [1.0] * len(samples), MicroBatching(max_tokens=budget, packed=True))


def by_row(batches, scores):
    """Row → scores of its trained tokens."""
    found = {}
    for batch, score in zip(batches, scores, strict=True):
        for place, row in enumerate(batch.rows):
            found[row] = score[batch.token_rows == place]
    return found


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2", "mistral", "qwen3_windowed"])
def test_packed_rows_have_the_logprobs_and_entropies_of_rows_alone(kind):
    """Alone, by the model's own code: its eager attention, whose softmax is float32, over one row at a time."""
    model = (tiny_model(kind) if kind in ("qwen3", "llama", "gemma2") else windowed(kind)).double()
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    policy = Policy(model)
    assert policy.packs
    assert model.config._attn_implementation == PACKED
    samples = rollout(reference, 9, max_len=20)
    batches = packed(samples)
    assert any(len(batch.rows) > 1 for batch in batches)
    with torch.no_grad():
        scores = [policy.score(batch, Distribution()) for batch in batches]
        logprobs, entropies = (by_row(batches, [score[i] for score in scores]) for i in (0, 1))
        for row, sample in enumerate(samples):
            log_probs = reference(torch.tensor([list(sample.tokens)])).logits[0].log_softmax(-1)
            start = len(sample.tokens) - sample.response_length
            places = [start + t for t, trained in enumerate(sample.loss_mask) if trained]
            expected = torch.stack([log_probs[place - 1, sample.tokens[place]] for place in places])
            torch.testing.assert_close(logprobs[row], expected, rtol=1e-6, atol=1e-6)
            entropy = torch.stack([-(log_probs[p - 1].exp() * log_probs[p - 1]).sum() for p in places])
            torch.testing.assert_close(entropies[row], entropy, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2", "mistral", "qwen3_windowed"])
def test_packing_leaves_the_gradient_of_padded_rows(kind):
    model = (tiny_model(kind) if kind in ("qwen3", "llama", "gemma2") else windowed(kind)).double()
    policy = Policy(model)
    samples = off_policy(rollout(model, 10, max_len=20))
    padded, metrics = flat_gradient(policy, samples, micro_batch_size=10)
    for budget in (1, 40, 100, 10_000):
        dynamic = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": budget}
        gradient, packed_metrics = flat_gradient(policy, samples, **dynamic)
        assert relative(gradient, padded) < 1e-6
        assert packed_metrics == pytest.approx(metrics, rel=1e-6)
    model.float()
    in_float32, _ = flat_gradient(policy, samples, use_dynamic_batch_size=True, max_tokens_per_gpu=100)
    assert relative(in_float32, padded) < 1e-4


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 1), min_size=1, max_size=8)), max_size=8))
def test_packed_batches_hold_every_trained_token_once_with_its_row(shapes):
    samples = [
        make_sample(range(100 * i, 100 * i + n + len(mask)), mask, index=i, advantage=float(i))
        for i, (n, mask) in enumerate(shapes)
    ]
    seen = []
    for batch in packed(samples, budget=20):
        mask = batch.loss_mask
        assert batch.ids.shape == batch.positions.shape == (1, sum(batch.row_lens))
        rows = [batch.rows[place] for place in batch.token_rows.tolist()]
        tokens = zip(batch.ids[mask].tolist(), batch.positions[mask].tolist(), batch.advantages[mask], strict=True)
        for row, (token, position, advantage) in zip(rows, tokens, strict=True):
            assert token == samples[row].tokens[position]
            assert advantage == samples[row].advantage
            seen.append((row, position))
    expected = [(i, n + t) for i, (n, mask) in enumerate(shapes) for t, trained in enumerate(mask) if trained]
    assert sorted(seen) == expected


def test_a_model_with_state_along_the_sequence_is_trained_on_padded_rows_within_the_budget():
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    policy = Policy(MambaForCausalLM(config).eval())
    assert not policy.packs
    samples = rollout(policy.model, 6)
    wide, _ = flat_gradient(policy, samples, micro_batch_size=6)
    narrow, _ = flat_gradient(policy, samples, use_dynamic_batch_size=True, max_tokens_per_gpu=50)
    assert relative(narrow, wide) < 1e-4


def test_layers_that_keep_their_window_to_themselves_are_not_packed():
    model = windowed("mistral")
    for layer in model.model.layers:
        layer.self_attn.config = copy.copy(model.config)
        layer.self_attn.config.sliding_window = None
    assert not set_attention(model, "sdpa")
    assert model.config._attn_implementation != PACKED


def test_a_model_that_makes_masks_of_its_own_is_not_packed():
    model = tiny_model()
    layer = model.model.layers[0].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, "attention_mask": torch.zeros(1, 1, 1, 1)})
    assert not set_attention(model, "sdpa")
    assert model.config._attn_implementation != PACKED


def test_flash_attention_is_refused_where_there_is_none():
    with pytest.raises(ConfigError, match="flash-attn"):
        set_attention(tiny_model().to(CPU), "flash_attention_2")


def test_recomputing_layers_and_half_precision_keep_the_gradient():
    model = tiny_model("llama")
    samples = off_policy(rollout(model, 8))
    dynamic = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 60}
    plain, _ = flat_gradient(Policy(copy.deepcopy(model)), samples, **dynamic)
    again, _ = flat_gradient(Policy(copy.deepcopy(model), recompute_layers=True), samples, **dynamic)
    assert relative(again, plain) < 1e-5
    half, metrics = flat_gradient(Policy(copy.deepcopy(model), half=True), samples, **dynamic)
    assert half.dtype == torch.float32
    assert 1e-4 < relative(half, plain) < 0.1
    assert metrics["train/n_skipped_steps"] == 0


@pytest.mark.parametrize(("recompute_layers", "n_runs"), [(False, 1), (True, 2)])
def test_recomputed_layers_are_run_again_in_the_backward_pass(recompute_layers, n_runs):
    model = tiny_model()
    policy = Policy(model, recompute_layers=recompute_layers)
    (batch,) = packed([make_sample([1, 2, 3], [1, 1])])
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    policy.score(batch, Distribution())[0].sum().backward()
    assert len(calls) == n_runs


def test_deterministic_training_of_packed_rows_does_not_depend_on_their_order():
    rows = [evolve(s, row=i, group_index=i, index=i) for i, s in enumerate(off_policy(rollout(tiny_model(), 8)))]
    weights = []
    for order in (rows, rows[::-1]):
        chosen = builders_settings(deterministic=True, use_dynamic_batch_size=True, max_tokens_per_gpu=40)
        updater = Updater(Policy(tiny_model()), chosen)
        run_phase(updater, order, lambda: None)
        weights.append(updater.weights)
    assert same_tensors(*weights)
