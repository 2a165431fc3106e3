"""Rotary embeddings that change with the length of what is read: found out, and refused where rows would mix."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from builders_train import SIZES, VOCAB, make_sample, settings
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from relax_trio.backend.embedded.model import ModelInfo
from relax_trio.backend.rope import constant_rope_len
from relax_trio.errors import ConfigError
from relax_trio.train.opening import open_updater
from relax_trio.train.packing import MicroBatching, micro_batches
from relax_trio.train.policy import Distribution, Policy

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_torch_thread")]

SHORT = 16
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


def phi3():
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    longrope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0 + 3.0 * i for i in range(8)],
        "original_max_position_embeddings": SHORT,
        "rope_theta": 10000.0,
    }
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return Phi3ForCausalLM(Phi3Config(**sizes, **ids, rope_parameters=longrope, original_max_position_embeddings=SHORT))


def llama():
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "max_position_embeddings": SHORT}, rope_parameters=DYNAMIC))


def strong(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def row(n, index):
    tokens = [(7 * t + 5 * index) % VOCAB for t in range(n)]
    return make_sample(tokens, [1] * (n - 1), index=index)


def scores(model, samples, *, packed):
    batching = MicroBatching(max_tokens=200, packed=True) if packed else MicroBatching(size=8)
    found = {}
    for batch in micro_batches(samples, [1.0] * len(samples), batching):
        with torch.no_grad():
            logprobs = Policy(model).score(batch, Distribution())[0]
        for place, position in enumerate(batch.rows):
            found[samples[position].index] = logprobs[batch.token_rows == place]
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("make", [phi3, llama])
def test_up_to_the_length_that_is_told_a_row_does_not_depend_on_its_batch(make, packed):
    model = strong(make())
    assert constant_rope_len(model.config) == SHORT
    alone = scores(model, [row(9, 1)], packed=packed)[1]
    assert torch.allclose(scores(model, [row(9, 1), row(SHORT, 2)], packed=packed)[1], alone, atol=1e-5)
    assert not torch.allclose(scores(model, [row(9, 1), row(SHORT + 8, 2)], packed=packed)[1], alone, atol=1e-3)


@pytest.mark.parametrize(("context_len", "refused"), [(SHORT, False), (SHORT + 1, True), (None, True)])
def test_longer_contexts_are_refused_when_the_model_is_loaded(tmp_path, context_len, refused):
    strong(phi3()).save_pretrained(tmp_path)
    chosen = evolve(settings(), context_len=context_len)
    if refused:
        with pytest.raises(ConfigError, match=f"beyond {SHORT} tokens.* set --rollout-max-context-len to {SHORT}"):
            open_updater(chosen, tmp_path, None)
    else:
        open_updater(chosen, tmp_path, None)
    assert ModelInfo(tmp_path).max_position == SHORT


def test_parameters_by_layer_type_count_as_the_strictest_and_plain_ones_not_at_all():
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    config = Gemma3TextConfig(rope_parameters={"full_attention": DYNAMIC, "sliding_attention": plain})
    assert constant_rope_len(config) == config.max_position_embeddings
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": SHORT}
    config.rope_parameters = {"full_attention": DYNAMIC, "sliding_attention": longrope}
    assert constant_rope_len(config) == SHORT
    assert constant_rope_len(LlamaConfig(**SIZES)) is None
