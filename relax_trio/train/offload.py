"""A trainer that shares its GPU: between two phases only the weights that are trained stay there.

The optimizer's moments (8 bytes a parameter) and the published copy of the weights (4) go to the CPU's memory, and the
allocator gives back what it keeps for later; the weights themselves (4) stay. What is sharded among processes stays
too: each has a part of it only. On a machine without a GPU nothing moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def park(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move an optimizer's moments to `device`, and give unused GPU memory back."""
    for values in optimizer.state.values():
        _move(values, device)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def unpark(optimizer: torch.optim.Optimizer) -> None:
    """Move each moment to where its parameter is."""
    for parameter, values in optimizer.state.items():
        _move(values, parameter.device)


def parked(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The same tensors on `device`."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _move(values: dict[str, Any], device: torch.device) -> None:
    for name, value in values.items():
        # The number of steps, a scalar, is where the optimizer wants it.
        if isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, DTensor):
            values[name] = value.to(device)
