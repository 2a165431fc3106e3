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
