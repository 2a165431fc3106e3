"""Trained weights as a backend takes them, and as undoing a phase needs them: out of the optimizer's reach."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from relax_trio.backend.base import AdapterWeights, WeightSource
from relax_trio.train.lora import PEFT_PREFIX, adapter_of, has_adapter, merged

_CONFIG = "adapter_config"


def snapshot(model: torch.nn.Module) -> WeightSource:
    """Copy the model's parameters. Where they are sharded, every process has to call it, and gets whole ones.

    Names are those of the checkpoint; a tied parameter appears once, under its first name, as it is saved. Buffers
    aren't trained and aren't included. An adapter is merged into the weights it is for, and there by itself too. What
    isn't trained is no copy.
    """
    tensors = {name: _whole(parameter) for name, parameter in model.named_parameters()}
    if not has_adapter(model):
        return WeightSource(tensors=tensors)
    return WeightSource(tensors=merged(model, tensors), adapter=adapter_of(model, tensors))


def write_source(source: WeightSource, path: Path) -> None:
    """Write a snapshot as one file for another process; see `read_source`. Blocking."""
    assert source.tensors is not None, "a snapshot has tensors"
    adapter = source.adapter
    tensors = dict(source.tensors) | ({} if adapter is None else dict(adapter.tensors))  # their names begin otherwise
    config = {} if adapter is None else {_CONFIG: json.dumps(adapter.config)}
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata=config)


def read_source(path: Path) -> WeightSource:
    """Read what `write_source` wrote; the tensors stay readable when the file is removed. Blocking."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as opened:
        config = (opened.metadata() or {}).get(_CONFIG)
    if config is None:
        return WeightSource(tensors=tensors)
    own = {name: tensors.pop(name) for name in tuple(tensors) if name.startswith(PEFT_PREFIX)}
    return WeightSource(tensors=tensors, adapter=AdapterWeights(config=json.loads(config), tensors=own))


def undo_point(model: torch.nn.Module, source: WeightSource) -> Mapping[str, torch.Tensor]:
    """What `put_back` needs to give the model its weights of now, of which `source` is a snapshot.

    Returns:
      Trained parameters by the model's own names: the snapshot's where it has them as they are, else copies.
    """
    assert source.tensors is not None, "a snapshot has tensors"
    if not has_adapter(model) and not any(isinstance(p, DTensor) for p in model.parameters()):
        return source.tensors
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def put_back(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give the model the trained weights of one of its undo points, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(tensors[name])


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        whole: torch.Tensor = parameter.full_tensor().detach()
        return whole
    return parameter.detach().clone() if parameter.requires_grad else parameter.detach()
