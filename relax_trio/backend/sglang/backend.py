"""SGLang servers as a `Backend`: what is refused, weights exchanged, Sessions closed.

Not covered: attempts on their way (attempts), which servers there are (keepers), what is said to them (client, wire).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import trio
from attrs import frozen

from relax_trio.backend.base import Attempt, AttemptResult, BackendLoad, WeightSource
from relax_trio.backend.refuse import refuse_unfit
from relax_trio.backend.sglang.attempts import Attempts
from relax_trio.backend.sglang.exchange import NewWeights, Recipe, Transfer, give_weights, recipe_for
from relax_trio.backend.sglang.fleet import Fleet, Routing, Server
from relax_trio.backend.sglang.keeper import Keeper
from relax_trio.backend.sglang.snapshots import Snapshots
from relax_trio.backend.sglang.stops import Decode
from relax_trio.errors import BackendError, BackendRejected, BackendUnavailable, WeightSyncError
from relax_trio.events import emit
from relax_trio.ids import Rid, WeightVersion
from relax_trio.sync.cleanup import cleanup_scope

CLOSE_SESSION_S = 2.0
_GOODBYE_S = 3.0


@frozen(kw_only=True)
class SGLangOptions:
    """How servers are used.

    Attributes:
      max_context_len: most tokens of prefix and completion, where that is less than what servers take.
      vocab_len: number of token ids of the model; one outside of it would kill the server.
      session_lifecycle: requests carry the Session's name, and servers are told when it ends.
      recipe, transfer: how weights change; see exchange.py.
    """

    max_context_len: int | None = None
    vocab_len: int | None = None
    routing: Routing = "least_loaded"
    session_lifecycle: bool = False
    recipe: Recipe = "auto"
    transfer: Transfer = "disk"


class SGLangBackend:
    """`Backend` over SGLang servers.

    Args:
      checkpoint: directory of the model the run begins with.
      version: its weight version.
      snapshot_dir: where later versions are written.
      keepers: where servers come from.
      options: how they are used.
      decode: token ids → text, special tokens included.
    """

    def __init__(
        self,
        checkpoint: Path,
        version: WeightVersion,
        *,
        snapshot_dir: Path,
        keepers: Iterable[Keeper],
        options: SGLangOptions | None = None,
        decode: Decode | None = None,
    ) -> None:
        self._options = options or SGLangOptions()
        self._snapshots = Snapshots(snapshot_dir, checkpoint, version)
        self._keepers = tuple(keepers)
        self._decode = decode
        self._fleet = Fleet(self._options.routing)
        self._attempts = Attempts(self._fleet, names_sessions=self._options.session_lifecycle, decode=decode)
        self._update_lock = trio.Lock()
        self._version = version
        self._max_context_len = self._options.max_context_len or 0
        self.counts: Counter[str] = Counter()

    @property
    def max_context_len(self) -> int:
        """See `Backend`. Known once servers are."""
        return self._max_context_len

    @property
    def weight_version(self) -> WeightVersion:
        """See `Backend`."""
        return self._version

    @property
    def servers(self) -> list[Server]:
        """Servers that take work now."""
        return self._fleet.servers

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """See `Backend`.

        Raises:
          BackendUnavailable: no server can be had, at the start or any more; ends with the tail of its log.

        Cancellation: attempts under way get BackendUnavailable; own servers are ended, others are told to abort.
        """
        try:
            async with trio.open_nursery() as nursery:
                events = [trio.Event() for _ in self._keepers]
                for keeper, event in zip(self._keepers, events, strict=True):
                    keep = partial(keeper.keep, self._fleet, self._snapshots, self._admit, event)
                    nursery.start_soon(keep, name="SGLang servers")
                for event in events:
                    await event.wait()  # each has its first server
                await nursery.start(self._attempts.run)
                task_status.started()
        finally:
            with cleanup_scope(_GOODBYE_S, "attempts on SGLang servers"):
                await self._attempts.say_goodbye()
            self._snapshots.remove()

    async def generate(self, attempt: Attempt) -> AttemptResult:
        """See `Backend`. Waits for a server while none is there but one is being started.

        Cancellation: acts at once; the server is told until it holds the attempt no more.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._attempts.is_serving:
            raise BackendUnavailable(f"attempt {attempt.rid}: the SGLang backend is not serving")
        refuse_unfit(
            attempt,
            running=self._attempts.named,
            max_context_len=self._max_context_len,
            vocab_len=self._options.vocab_len,
        )
        if attempt.sampling.stop and self._decode is None:
            raise BackendRejected(f"attempt {attempt.rid}: stop strings need a backend that was given a decoder")
        return await self._attempts.fly(attempt)

    async def abort(self, rid: Rid) -> None:
        """See `Backend`. Returns at once; the abort is repeated until the server has answered."""
        self._attempts.call_back(rid)
        await trio.lowlevel.checkpoint()

    async def update_weights(self, version: WeightVersion, source: WeightSource) -> None:
        """See `Backend`. No new attempt begins meanwhile; what happens to those under way is the recipe's business.

        Raises:
          WeightSyncError: the source doesn't fit; or a server refuses it, or refuses to flush its cache. Then servers
            may serve different versions, and the run must end.

        Cancellation: some servers may have the new weights and others not.
        """
        if not self._attempts.is_serving:
            raise WeightSyncError(f"weights {version!r}: the SGLang backend is not serving")
        async with self._update_lock:
            recipes = {server: recipe_for(server, self._options.recipe) for server in self._fleet.servers}
            await self._snapshots.publish(version, source)
            tensors = source.tensors if self._options.transfer == "tensor" else None
            new = NewWeights(version=version, path=self._snapshots.path, tensors=tensors)
            self._attempts.gate.shut(f"weights {version}")
            try:
                failures: list[WeightSyncError] = []
                async with trio.open_nursery() as nursery:
                    for server, recipe in recipes.items():
                        update = partial(self._update_server, server, new, recipe, failures)
                        nursery.start_soon(update, name=f"weights {version}")
                if failures:
                    raise failures[0]
                self._version = version
            finally:
                self._attempts.gate.open()
        emit("weights.updated", version=version, servers=len(recipes))

    async def close_session(self, session_key: str) -> None:
        """See `Backend`: tells every server, where the Session lifecycle is on. Failures are counted, and harmless.

        Cancellation: safe. Takes at most `CLOSE_SESSION_S`.
        """
        await trio.lowlevel.checkpoint()
        if not self._options.session_lifecycle or not self._attempts.is_serving:
            return
        servers = self._fleet.servers
        n_closed = self.counts["session/close"]
        with trio.move_on_after(CLOSE_SESSION_S):
            await self._attempts.wait_ended(session_key)
            async with trio.open_nursery() as nursery:
                for server in servers:
                    nursery.start_soon(self._close_on, server, session_key, name=f"close session {session_key}")
        n_failed = len(servers) - (self.counts["session/close"] - n_closed)
        if n_failed > 0:
            emit("session.close_failed", session=session_key, servers=n_failed)
            self.counts["session/close_failure"] += n_failed

    def load(self) -> BackendLoad:
        """See `Backend`."""
        n_running = self._attempts.n_running
        return BackendLoad(
            n_running=n_running,
            n_waiting=self._attempts.n_airborne - n_running,
            n_total_tokens=sum(server.info.max_total_tokens for server in self._fleet.servers),
            extra={f"agentic_kv/{name}": float(value) for name, value in self.counts.items()},
        )

    # --- servers and weights ----------------------------------------------------------------------------------

    async def _admit(self, server: Server, has: WeightVersion | None) -> None:
        """See `Admit`."""
        async with self._update_lock:
            if has != self._snapshots.version:
                new = NewWeights(version=self._snapshots.version, path=self._snapshots.path)
                await give_weights(server, new, "drain")
            taken = server.info.max_context_len
            self._max_context_len = min(self._max_context_len or taken, taken)
            self._fleet.admit(server)

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

    async def _close_on(self, server: Server, session_key: str) -> None:
        try:
            await server.client.close_session(session_key)
        except BackendError:
            return  # counted by the caller
        self.counts["session/close"] += 1
