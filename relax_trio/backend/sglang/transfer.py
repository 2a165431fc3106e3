"""One version on its way to one server: what is sent, and how it gets there. When, and what comes after, is exchange's.

Whole weights go through a checkpoint directory, inside requests, or by a broadcast (distributed); an adapter through a
directory or inside a request.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import trio
from attrs import frozen

from relax_trio.backend.base import AdapterWeights
from relax_trio.backend.sglang.adapters import load_adapter
from relax_trio.backend.sglang.client import CONTROL_S
from relax_trio.backend.sglang.fleet import Server
from relax_trio.backend.sglang.groups import UpdateGroups
from relax_trio.ids import WeightVersion
from relax_trio.sync.cleanup import cleanup_scope

if TYPE_CHECKING:
    import torch

Transfer = Literal["disk", "tensor", "distributed"]

BUCKET_BYTES = 256 * 1024 * 1024
"""Tensors that go into one request, or one round of broadcasts, together."""


@frozen(kw_only=True)
class NewWeights:
    """One version on its way to the servers.

    Attributes:
      path: directory that has it: a checkpoint, or the adapter in PEFT's layout.
      tensors: whole weights in this process's memory, where they are to be sent from there.
      groups: the tensors are broadcast in these; None: they travel inside requests.
      is_adapter: it is an adapter, on top of weights that the server has.
      adapter: the adapter in this process's memory, where it is to be sent from there.
    """

    version: WeightVersion
    path: Path
    tensors: Mapping[str, torch.Tensor] | None = None
    groups: UpdateGroups | None = None
    is_adapter: bool = False
    adapter: AdapterWeights | None = None


async def load(server: Server, new: NewWeights) -> None:
    """Have a server take over `new`; its cache is not flushed by that.

    Raises:
      BackendError: refused, or no answer.

    Cancellation: the server may have a part of it.
    """
    if new.is_adapter:
        serialized = None
        if new.adapter is not None:
            serialized = await trio.to_thread.run_sync(partial(serialize, dict(new.adapter.tensors)))
        await load_adapter(server, new.version, new.path, new.adapter, serialized)
        return
    if new.tensors is None:
        await server.client.load_from_disk(new.path, new.version)
    else:
        async with _bracket(server):
            for bucket in buckets(new.tensors):
                if new.groups is None:
                    serialized = await trio.to_thread.run_sync(partial(serialize, bucket))
                    await server.client.load_tensors(serialized, server.info.n_ranks, new.version)
                else:
                    await new.groups.send(server, bucket, new.version)


@asynccontextmanager
async def _bracket(server: Server) -> AsyncIterator[None]:
    """What newer servers want around tensors."""
    if not await server.client.has_post("/begin_weight_update"):
        yield
        return
    await server.client.update_session("begin")
    try:
        yield
    finally:
        with cleanup_scope(CONTROL_S, f"ending the weight update of {server.name}"):
            await server.client.update_session("end")


def buckets(tensors: Mapping[str, torch.Tensor], size: int = BUCKET_BYTES) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Split named tensors into lists of about `size` bytes, none empty."""
    bucket: list[tuple[str, torch.Tensor]] = []
    n_bytes = 0
    for name, tensor in tensors.items():
        bucket.append((name, tensor))
        n_bytes += tensor.numel() * tensor.element_size()
        if n_bytes >= size:
            yield bucket
            bucket, n_bytes = [], 0
    if bucket:
        yield bucket


def serialize(named: list[tuple[str, torch.Tensor]] | dict[str, torch.Tensor]) -> str:
    """Named tensors as SGLang unpickles them, in base64; whole weights as a list, an adapter as a mapping.

    Their bytes travel inside: torch's sharing of descriptors between processes that are no kin kills the server.
    """
    import torch

    items = named.items() if isinstance(named, dict) else named
    on_cpu = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in items]
    assert all(type(tensor) is torch.Tensor for _, tensor in on_cpu), "a subclass would not be unpickled there"
    return base64.b64encode(pickle.dumps(dict(on_cpu) if isinstance(named, dict) else on_cpu)).decode()
