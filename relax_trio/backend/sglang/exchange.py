"""New weights for one server: how attempts in flight are dealt with, how the tensors get there, what is checked after.

Three recipes are safe. *drain*: every attempt ends first. *abort*: attempts are called back and go on afterwards from
what they have. *retract*: the server puts them back into its queue, with its cache flushed, and goes on by itself; that
needs a server that tells the version of each token (older ones name the last version for all, and die of a flush
while something is retracted). *in_place* keeps the cache of the old weights: allowed only where somebody asked for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import trio

from relax_trio.backend.sglang.adapters import unload_unused
from relax_trio.backend.sglang.client import CONTROL_S, FLUSH_WAIT_S, PauseMode
from relax_trio.backend.sglang.fleet import Server
from relax_trio.backend.sglang.memory import take_back
from relax_trio.backend.sglang.transfer import NewWeights, load
from relax_trio.errors import BackendError, BackendUnavailable, WeightSyncError
from relax_trio.events import emit
from relax_trio.sync.cleanup import cleanup_scope

Recipe = Literal["auto", "drain", "abort", "retract", "in_place"]

_GONE_S = 2.0


def recipe_for(server: Server, wanted: Recipe, *, with_adapters: bool = False) -> Recipe:
    """What is done on this server: "auto" takes the best that its version can do.

    Args:
      with_adapters: what changes is an adapter. An attempt that is put back goes on under the one that it began with,
        so that nothing is won by it: attempts end first, or are called back and go on under the new one.

    Raises:
      WeightSyncError: the server can't do what was asked for.
    """
    if with_adapters and wanted not in ("auto", "drain", "abort"):
        raise WeightSyncError(f"an adapter can't change under an attempt ({wanted}); use abort or drain")
    if wanted == "auto" and with_adapters:
        return "abort"
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

    A server that is paused already stays so. One that is paused in place keeps its cache where attempts are on it.
    Returns, too, when the server is lost over it: one that comes back gets these weights before it gets work.

    Raises:
      WeightSyncError: the server refuses the weights or to flush its cache, or serves another version afterwards, or
        somebody else has changed its weights meanwhile.

    Cancellation: the server is told to go on.
    """
    pause = _pause_for(server, recipe)
    server.hold(f"weights {new.version}")
    try:
        with server.until_gone():
            await _exchange(server, new, pause)
    except BackendUnavailable as exc:
        # Dead servers are noticed elsewhere.
        with trio.move_on_after(_GONE_S):
            await server.gone.wait()
        if server.lost is None:
            raise WeightSyncError(f"weights {new.version!r}: {exc}") from exc
    except BackendError as exc:
        raise WeightSyncError(f"weights {new.version!r}: {exc}") from exc
    finally:
        server.release()
    if server.lost is None:
        emit("server.updated", server=server.name, version=new.version, pause=pause)


async def _exchange(server: Server, new: NewWeights, pause: PauseMode | None) -> None:
    await _refuse_shared(server)
    async with _paused(server, pause):
        await take_back(server, "weights")
        await load(server, new)
        await take_back(server, "kv_cache")
        if _wants_flush(server, new, pause):
            if pause == "in_place":
                # A batch that is held in place keeps what has ended, which counts as running. Retracted it is dropped.
                await server.client.pause("retract")
                if server.paused is not None:
                    server.paused = "retract"
            await server.client.flush_cache(0 if pause else FLUSH_WAIT_S)
        server.served = await server.client.served()
    if server.served.version != new.version:
        raise WeightSyncError(
            f"{server.name} serves weights {server.served.version!r} after it was given {new.version!r}"
        )
    await unload_unused(server)


async def _refuse_shared(server: Server) -> None:
    """Two runs on one server would train on tokens of each other's weights, which may go by the same version."""
    if server.served is not None and (found := await server.client.served()) != server.served:
        given = server.served
        raise WeightSyncError(
            f"{server.name} serves {found.version!r} of {found.path}, but this run gave it {given.version!r} of "
            f"{given.path}: somebody else changes its weights; a server takes one run at a time"
        )


def _wants_flush(server: Server, new: NewWeights, pause: PauseMode | None) -> bool:
    """Whether the prefix cache has to go. It is kept with an adapter: a server's cache knows adapters apart."""
    return not new.is_adapter and (pause != "in_place" or not server.n_legs)


def _pause_for(server: Server, recipe: Recipe) -> PauseMode | None:
    """How the server is paused while its weights change: as it is already, or for the sake of attempts on it."""
    if server.paused is not None or not server.n_legs:
        return server.paused
    return recipe if recipe in ("retract", "in_place") else None


@asynccontextmanager
async def _paused(server: Server, pause: PauseMode | None) -> AsyncIterator[None]:
    """Pause a server for the length of the block, unless it is paused for longer than that."""
    if pause is None or server.paused is not None:
        yield
        return
    await server.client.pause(pause)
    try:
        yield
    finally:
        with cleanup_scope(CONTROL_S, f"continuing {server.name}"):
            await server.client.resume()
