"""Adapters for `builders_sglang.served_model`, and the plain models that they make of it."""

from __future__ import annotations

import torch
from attrs import evolve
from builders_sglang import served_model

from relax_trio.backend.base import WeightSource
from relax_trio.config.tree import TrainConfig
from relax_trio.train.lora import add_adapter
from relax_trio.train.weights import snapshot

RANK = 4
LORA_FLAGS = (
    *("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras-per-batch", "2"),
    *("--lora-backend", "torch_native", "--lora-target-modules", "all"),
)


def adapter_source(seed, model=None):
    """Weights as a trainer with `--lora-rank` gives them: the adapter by itself and merged, both drawn from `seed`."""
    model = served_model() if model is None else model
    add_adapter(model, TrainConfig(lora_rank=RANK))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.2)
    return snapshot(model)


def merged_model(source):
    """A plain model with the merged weights of a source."""
    model = served_model()
    model.load_state_dict(dict(source.tensors), strict=False)
    return model.eval()


def without_matrix(source):
    """The same adapter with one of its matrices missing."""
    adapter = source.adapter
    name = next(iter(adapter.tensors))
    rest = {other: tensor for other, tensor in adapter.tensors.items() if other != name}
    return WeightSource(tensors=source.tensors, adapter=evolve(adapter, tensors=rest))
