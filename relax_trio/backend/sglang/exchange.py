"""New weights for one server: how attempts in flight are dealt with, how the tensors get there, what is checked after.

Three recipes are safe. *drain*: every attempt ends first. *abort*: attempts are called back and go on afterwards from
what they have. *retract*: the server puts them back into its queue, with its cache flushed, and goes on by itself; that
needs a server that tells the version of each token (older ones name the last version for all, and die of a flush
while something is retracted). *in_place* keeps the cache of the old weights: allowed only where somebody asked for it.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import trio
from attrs import frozen

from relax_trio.backend.sglang.client import CONTROL_S, FLUSH_WAIT_S, PauseMode
from relax_trio.backend.sglang.fleet import Server
from relax_trio.errors import BackendError, BackendUnavailable, WeightSyncError
from relax_trio.events import emit
from relax_trio.ids import WeightVersion
from relax_trio.sync.cleanup import cleanup_scope

if TYPE_CHECKING:
    import torch

Recipe = Literal["auto", "drain", "abort", "retract", "in_place"]
Transfer = Literal["disk", "tensor"]

BUCKET_BYTES = 256 * 1024 * 1024
"""Tensors that go into one request together."""

_GONE_S = 2.0


@frozen(kw_only=True)
class NewWeights:
    """One version on its way to the servers.

    Attributes:
      path: directory that has it.
      tensors: the same in this process's memory, where they are to be sent from there.
    """

    version: WeightVersion
    path: Path
    tensors: Mapping[str, torch.Tensor] | None = None


def recipe_for(server: Server, wanted: Recipe) -> Recipe:
    """What is done on this server: "auto" takes the best that its version can do.

    Raises:
      WeightSyncError: the server can't do what was asked for.
    """
    if wanted == "auto":
        return "retract" if server.has_spans else "abort"
    if wanted in ("retract", "in_place") and not server.has_spans:
        raise WeightSyncError(
            f"{server.name} (SGLang {server.info.version}) names one version for a whole answer, so weights can't "
            f"change under an attempt (--sglang-update-recipe {wanted}); use abort or drain"
        )
    return wanted


async def give_weights(server: Server, new: NewWeights, recipe: Recipe) -> None:
    """Load `new` on a server on which, but for retract and in_place, no attempt of ours runs.

    Raises:
      WeightSyncError: the server refuses the weights or to flush its cache, or serves another version afterwards.

    Cancellation: the server is told to go on.
    """
    pause: PauseMode | None = None
    if server.n_legs and recipe == "retract":
        pause = "retract"
    elif server.n_legs and recipe == "in_place":
        pause = "in_place"
    server.hold(f"weights {new.version}")
    try:
        if pause is not None:
            await server.client.pause(pause)
        try:
            await _load(server, new)
            if pause != "in_place":
                await server.client.flush_cache(0 if pause else FLUSH_WAIT_S)
            served = await server.client.weight_version()
        finally:
            if pause is not None:
                with cleanup_scope(CONTROL_S, f"continuing {server.name}"):
                    await server.client.resume()
        if served != new.version:
            raise WeightSyncError(f"{server.name} serves weights {served!r} after it was given {new.version!r}")
    except BackendUnavailable as exc:
        # Dead servers are noticed elsewhere; one that comes back gets these weights before it gets work.
        with trio.move_on_after(_GONE_S):
            await server.gone.wait()
        if server.lost is None:
            raise WeightSyncError(f"weights {new.version!r}: {exc}") from exc
    except BackendError as exc:
        raise WeightSyncError(f"weights {new.version!r}: {exc}") from exc
    finally:
        server.release()
    emit("server.updated", server=server.name, version=new.version, pause=pause)


async def _load(server: Server, new: NewWeights) -> None:
    if new.tensors is None:
        await server.client.load_from_disk(new.path, new.version)
        return
    bracketed = await server.client.needs_update_session()
    if bracketed:
        await server.client.update_session("begin")
    try:
        for bucket in buckets(new.tensors):
            serialized = await trio.to_thread.run_sync(partial(serialize, bucket))
            await server.client.load_tensors(serialized, server.info.n_ranks, new.version)
    finally:
        if bracketed:
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


def serialize(bucket: list[tuple[str, torch.Tensor]]) -> str:
    """Named tensors as SGLang unpickles them, in base64.

    Their bytes travel inside: torch's sharing of descriptors between processes that are no kin kills the server.
    """
    import torch

    on_cpu = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in bucket]
    assert all(type(tensor) is torch.Tensor for _, tensor in on_cpu), "a subclass would not be unpickled there"
    return base64.b64encode(pickle.dumps(on_cpu)).decode()
