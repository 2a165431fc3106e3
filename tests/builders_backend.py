"""Builders for backend tests: attempts, tiny random checkpoints, a served backend."""

from __future__ import annotations

import functools
from array import array
from contextlib import asynccontextmanager
from itertools import count

import torch
import trio
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from relax_trio.backend.base import Attempt, SamplingParams
from relax_trio.ids import Rid

VOCAB_LEN = 97
CONTEXT_LEN = 640

_rids = count()


def make_attempt(prefix, *, rid=None, session="s", response_start=None, max_new_tokens=8, **sampling):
    """An attempt with a fresh rid; `sampling` goes to SamplingParams."""
    return Attempt(
        rid=Rid(rid or f"a{next(_rids)}"),
        token_ids=array("i", prefix),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, **sampling),
        session_key=session,
        response_start=len(prefix) if response_start is None else response_start,
    )


def make_model(kind, seed=0):
    """A tiny random causal LM with logits spread enough to tell tokens apart. `kind`: qwen3, llama or gpt2."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB_LEN, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(**sizes, n_positions=CONTEXT_LEN, n_embd=32, n_layer=2, n_head=4))
    sizes |= {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_LEN,
    }
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=True))


def save_checkpoint(model, path):
    """Write `model` as a Hugging Face checkpoint directory."""
    logging.disable_progress_bar()
    model.save_pretrained(path)
    return path


def recompute(model, tokens, n_new, temperature=1.0):
    """Logprobs of the last `n_new` of `tokens` by one plain forward pass: a list of floats."""
    with torch.inference_mode():
        logits = model.eval()(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
    log_probs = torch.log_softmax(logits[:-1] / temperature, dim=-1)
    picked = log_probs.gather(1, torch.tensor(list(tokens[1:]))[:, None]).squeeze(1)
    return picked[-n_new:].tolist()


@asynccontextmanager
async def serving(backend):
    """Run `backend` around the block."""
    async with trio.open_nursery() as nursery:
        await nursery.start(functools.partial(backend.run))
        yield backend
        nursery.cancel_scope.cancel(reason="the test is done with its backend")


async def generate_all(backend, attempts):
    """Results of attempts that run at once, in their order."""
    results = [None] * len(attempts)

    async def one(i, attempt):
        results[i] = await backend.generate(attempt)

    async with trio.open_nursery() as nursery:
        for i, attempt in enumerate(attempts):
            nursery.start_soon(one, i, attempt)
    return results
