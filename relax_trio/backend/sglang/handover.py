"""The weights of a run and its servers: a new version for all, the current one for a server that comes, memory lent.

Everything here happens under one lock. What becomes of attempts under way is the recipe's business (exchange); how a
version gets to one server, transfer's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import trio

from relax_trio.backend.base import WeightSource
from relax_trio.backend.sglang.adapters import require_adapters
from relax_trio.backend.sglang.attempts import Attempts
from relax_trio.backend.sglang.exchange import Recipe, give_weights, recipe_for
from relax_trio.backend.sglang.fleet import Fleet, Server
from relax_trio.backend.sglang.groups import UpdateGroups, require_group
from relax_trio.backend.sglang.memory import give_up, require_memory_saver
from relax_trio.backend.sglang.pauses import Pauses
from relax_trio.backend.sglang.snapshots import Snapshots
from relax_trio.backend.sglang.transfer import NewWeights, Transfer
from relax_trio.errors import BackendError, TrainError, WeightSyncError
from relax_trio.events import emit
from relax_trio.ids import WeightVersion

_GONE_S = 2.0


class Handover:
    """Gives servers their weights.

    Args:
      lock: held while weights change; attempts are not paused meanwhile.
      pauses: whether attempts are paused across an update.
      recipe, transfer: how weights change.
      adapter_rank: what changes is an adapter of this rank; None: whole weights.
      lends_memory: servers have to be able to release theirs.
    """

    def __init__(
        self,
        fleet: Fleet,
        attempts: Attempts,
        snapshots: Snapshots,
        pauses: Pauses,
        lock: trio.Lock,
        *,
        recipe: Recipe = "auto",
        transfer: Transfer = "disk",
        adapter_rank: int | None = None,
        lends_memory: bool = False,
    ) -> None:
        self._fleet = fleet
        self._attempts = attempts
        self._snapshots = snapshots
        self._pauses = pauses
        self._lock = lock
        self._recipe: Recipe = recipe
        self._transfer: Transfer = transfer
        self._adapter_rank = adapter_rank
        self._lends_memory = lends_memory
        self._groups = UpdateGroups()
        self._is_lent = False

    async def update(self, version: WeightVersion, source: WeightSource) -> None:
        """See `Backend.update_weights`. Inside `lent` servers take their memory back for it."""
        if self._is_lent:
            await self._update(version, source)
        else:
            async with self._lock:
                await self._update(version, source)

    async def admit(self, server: Server, has: WeightVersion | None) -> None:
        """Give a server that comes what the run's servers have, and then work; see `Admit`.

        Raises:
          ConfigError: it can't take what it will be given.
          WeightSyncError: it refuses.
        """
        if self._lends_memory:
            require_memory_saver(server)
        if self._adapter_rank is not None:
            require_adapters(server, self._adapter_rank)
        elif self._transfer == "distributed":
            require_group(server)
        async with self._lock:
            if has is None:
                await self._snapshots.refuse_other_model(server)
            base, adapter = self._snapshots.version, self._snapshots.adapter
            if has != base:
                await give_weights(server, NewWeights(version=base, path=self._snapshots.path), "drain")
            if adapter is not None:
                new = NewWeights(version=adapter.version, path=adapter.path, is_adapter=True)
                await give_weights(server, new, "drain")
            if server.lost is None:
                self._fleet.admit(server)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Somebody else has the servers' GPU memory for the length of the block; no attempt begins or goes on.

        A server is back once `update` has given it new weights. One that has none at the end of the block, because
        nothing was updated or training failed, is given those of before. Left by anything else, servers stay as they
        are: the run ends, and they with it.

        Raises (on entering):
          WeightSyncError: a server does not release its memory.

        Cancellation: servers have no weights then, and no attempt goes on.
        """
        async with self._lock:
            self._attempts.gate.shut("the trainer has the servers' memory")
            paused: list[Server] = []
            await self._each(partial(self._give_up, paused))
            self._is_lent = True
            try:
                try:
                    yield
                except TrainError:
                    await self._end_loan(paused)
                    raise
                await self._end_loan(paused)
            finally:
                self._is_lent = False

    async def close(self) -> None:
        """Have servers that live on forget what ties them to this process."""
        await self._groups.close()

    async def _update(self, version: WeightVersion, source: WeightSource) -> None:
        with_adapters = self._adapter_rank is not None
        recipes = {
            server: server.paused or recipe_for(server, self._recipe, with_adapters=with_adapters)
            for server in self._fleet.servers
        }
        new = await self._publish(version, source)
        self._attempts.gate.shut(f"weights {version}")
        try:
            failures: list[WeightSyncError] = []
            async with trio.open_nursery() as nursery:
                for server, recipe in recipes.items():
                    update = partial(self._update_server, server, new, recipe, failures)
                    nursery.start_soon(update, name=f"weights {version}")
            if failures:
                raise failures[0]
        finally:
            self._open_gate()
        emit("weights.updated", version=version, servers=len(recipes))

    async def _publish(self, version: WeightVersion, source: WeightSource) -> NewWeights:
        in_memory = self._transfer != "disk"
        if self._adapter_rank is not None:
            adapter = await self._snapshots.publish_adapter(version, source)
            return NewWeights(
                version=version,
                path=adapter.path,
                is_adapter=True,
                adapter=source.adapter if in_memory else None,
            )
        await self._snapshots.publish(version, source)
        return NewWeights(
            version=version,
            path=self._snapshots.path,
            tensors=source.tensors if in_memory else None,
            groups=self._groups if self._transfer == "distributed" else None,
        )

    async def _update_server(
        self, server: Server, new: NewWeights, recipe: Recipe, failures: list[WeightSyncError]
    ) -> None:
        if recipe in ("abort", "drain"):
            await self._attempts.clear(server, abort=recipe == "abort")
        if server.lost is None:
            try:
                await give_weights(server, new, recipe)
            except WeightSyncError as exc:
                failures.append(exc)

    async def _give_up(self, paused: list[Server], server: Server) -> None:
        """Get attempts off a server, and have it release its memory; `paused` gets those that are paused for that."""
        recipe = server.paused or recipe_for(server, self._recipe)
        if recipe == "in_place":
            raise WeightSyncError(f"{server.name} keeps attempts in its memory (in_place), so it can't be released")
        if recipe in ("abort", "drain"):
            await self._attempts.clear(server, abort=recipe == "abort")
        elif server.paused is None and server.n_legs:
            paused.append(server)
            server.paused = "retract"
            server.hold("the trainer has its memory")
            await server.client.pause("retract")
        if server.lost is None:
            server.hold("the trainer has its memory")
            await give_up(server)

    async def _end_loan(self, paused: list[Server]) -> None:
        await self._each(self._give_back)
        await self._each(partial(self._go_on, paused))
        self._is_lent = False
        self._open_gate()

    async def _give_back(self, server: Server) -> None:
        if server.released:
            current = NewWeights(version=self._snapshots.version, path=self._snapshots.path)
            await give_weights(server, current, server.paused or "drain")

    async def _go_on(self, paused: list[Server], server: Server) -> None:
        if server in paused:
            await server.client.resume()
            server.paused = None
            server.release()

    async def _each(self, do: Callable[[Server], Awaitable[None]]) -> None:
        """Do something with every server at once; one that is lost over it is let go.

        Raises:
          WeightSyncError: it failed on a server that is there.
        """
        failures: list[WeightSyncError] = []

        async def attempt(server: Server) -> None:
            try:
                await do(server)
            except WeightSyncError as exc:
                failures.append(exc)
            except BackendError as exc:
                with trio.move_on_after(_GONE_S):
                    await server.gone.wait()
                if server.lost is None:
                    failures.append(WeightSyncError(str(exc)))

        async with trio.open_nursery() as nursery:
            for server in self._fleet.servers:
                nursery.start_soon(attempt, server, name=f"memory of {server.name}")
        if failures:
            raise failures[0]

    def _open_gate(self) -> None:
        if not self._is_lent and not self._pauses.is_on:
            self._attempts.gate.open()
