"""Trained weights as a backend takes them: by name, and out of the optimizer's reach."""

from __future__ import annotations

import torch

from relax_trio.backend.base import WeightSource


def snapshot(model: torch.nn.Module) -> WeightSource:
    """Copy the model's parameters.

    Names are those of the checkpoint; a tied parameter appears once, under its first name, as it is saved. Buffers
    aren't trained and aren't included.
    """
    return WeightSource(tensors={name: p.detach().clone() for name, p in model.named_parameters()})


def put_back(model: torch.nn.Module, source: WeightSource) -> None:
    """Give the model the weights of one of its snapshots, in place."""
    assert source.tensors is not None, "a snapshot has tensors"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.tensors[name])
