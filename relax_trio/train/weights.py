"""Trained weights as a backend takes them, and as undoing a phase needs them: out of the optimizer's reach."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from relax_trio.backend.base import WeightSource
from relax_trio.train.lora import has_adapter, merged


def snapshot(model: torch.nn.Module) -> WeightSource:
    """Copy the model's parameters. Where they are sharded, every process has to call it, and gets whole ones.

    Names are those of the checkpoint; a tied parameter appears once, under its first name, as it is saved. Buffers
    aren't trained and aren't included. An adapter is merged into the weights it is for. What isn't trained is no copy.
    """
    tensors = {name: _whole(parameter) for name, parameter in model.named_parameters()}
    return WeightSource(tensors=merged(model, tensors) if has_adapter(model) else tensors)


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
