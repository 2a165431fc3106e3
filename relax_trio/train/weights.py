"""Trained weights as a backend takes them: named, versioned, and out of the optimizer's reach."""

from __future__ import annotations

import torch

from relax_trio.backend.base import WeightSource
from relax_trio.ids import WeightVersion


def version_of(n_phases: int) -> WeightVersion:
    """Name of the weights after `n_phases` optimizer phases: "0" are the checkpoint's own."""
    return WeightVersion(str(n_phases))


def snapshot(model: torch.nn.Module) -> WeightSource:
    """Copy the model's parameters.

    Names are those of the checkpoint; a tied parameter appears once, under its first name, as it is saved. Buffers
    aren't trained and aren't included.
    """
    return WeightSource(tensors={name: p.detach().clone() for name, p in model.named_parameters()})
