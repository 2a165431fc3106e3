"""Several processes that train one model: who scores which micro-batch, and how their numbers come together.

Weights, gradients and optimizer state are sharded by PyTorch's FSDP2. Every process packs the same rows in the same
way, takes every n-th micro-batch, and learns what all of them found; so all take the same decisions, and what a process
does is otherwise the code of one. Not covered: how the processes are started and told what to do (rank.py,
processes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from relax_trio.train.policy import Policy

T = TypeVar("T")


class Joins(Protocol):
    """Numbers to which those of another process can be added."""

    def join(self, other: Self) -> None:
        """Add another's numbers."""
        ...


J = TypeVar("J", bound=Joins)


@frozen(eq=False)
class Team:
    """The processes that train together; by default one alone.

    Attributes:
      rank: this process's number, from 0.
      n: processes.
      mesh: over which weights are sharded; None for one alone.
    """

    rank: int = 0
    n: int = 1
    mesh: DeviceMesh | None = None

    def shard(self, policy: Policy) -> None:
        """Shard the policy's weights; layers one by one, so that only one is whole at a time."""
        if self.mesh is None:
            return
        for layer in policy.model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                fully_shard(layer, mesh=self.mesh)
        fully_shard(policy.scorer, mesh=self.mesh)

    def rounds(self, items: Sequence[T]) -> list[T | None]:
        """What this process takes of `items`: as many for each, with None where there are too few.

        A forward pass is one of all processes together, so whoever has nothing left has to take part all the same.
        """
        n_rounds = -(-len(items) // self.n)
        places = range(self.rank, n_rounds * self.n, self.n)
        return [items[place] if place < len(items) else None for place in places]

    def spread(self, mine: Sequence[torch.Tensor], n_items: int) -> list[torch.Tensor]:
        """Give every process what each found for its part of `rounds`, in the order of the items. On the CPU."""
        if self.n == 1:
            return list(mine)
        found: list[Any] = [None] * self.n
        dist.all_gather_object(found, [tensor.cpu() for tensor in mine])
        return [found[place % self.n][place // self.n] for place in range(n_items)]

    def join(self, own: J, empty: Callable[[], J]) -> J:
        """Add up the numbers of all processes, in their order, for every process."""
        if self.n == 1:
            return own
        found: list[Any] = [None] * self.n
        dist.all_gather_object(found, own)
        total = empty()
        for part in found:
            total.join(part)
        return total

    def whole(self, value: Any) -> Any:
        """The same nest of dicts and lists with whole tensors in place of sharded ones, on the CPU in a team.

        Every process has to call it.
        """
        if self.n == 1:
            return value
        return _map(value, lambda t: t.full_tensor().cpu() if isinstance(t, DTensor) else t)

    def sharded(self, value: Any, like: torch.Tensor) -> Any:
        """This process's part of a whole tensor that belongs to the parameter `like`; other things as they are."""
        if isinstance(like, DTensor) and isinstance(value, torch.Tensor) and value.shape == like.shape:
            return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
        return value


ALONE = Team()


def release(policy: Policy) -> None:
    """After a score without gradients: let go of whole weights, which the next optimizer step makes stale."""
    if isinstance(policy.scorer, FSDPModule):
        policy.scorer.reshard()


def _map(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {key: _map(item, fn) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map(item, fn) for item in value)
    return value
