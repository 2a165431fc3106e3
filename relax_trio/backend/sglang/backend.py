"""SGLang servers as a `Backend`: what is refused, weights exchanged, Sessions closed.

Not covered: attempts on their way (attempts), which servers there are (keepers), what is said to them (client, wire).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import trio
from attrs import frozen

from relax_trio.backend.base import Attempt, AttemptResult, BackendLoad, WeightSource
from relax_trio.backend.refuse import refuse_unfit
from relax_trio.backend.sglang.adapters import SavedAdapter
from relax_trio.backend.sglang.attempts import Attempts
from relax_trio.backend.sglang.client import PauseMode
from relax_trio.backend.sglang.exchange import Recipe
from relax_trio.backend.sglang.fleet import Fleet, Routing, Server
from relax_trio.backend.sglang.handover import Handover
from relax_trio.backend.sglang.images import ImagePrompts
from relax_trio.backend.sglang.keeper import Keeper
from relax_trio.backend.sglang.pauses import Pauses
from relax_trio.backend.sglang.snapshots import Snapshots
from relax_trio.backend.sglang.stops import Decode
from relax_trio.backend.sglang.transfer import Transfer
from relax_trio.errors import BackendError, BackendRejected, BackendUnavailable, ConfigError, WeightSyncError
from relax_trio.events import emit
from relax_trio.ids import Rid, WeightVersion
from relax_trio.sync.cleanup import cleanup_scope
from relax_trio.tokens.pads import Pads

CLOSE_SESSION_S = 2.0
_GOODBYE_S = 3.0
_UNDER_ADAPTER = WeightVersion("base")


@frozen(kw_only=True)
class SGLangOptions:
    """How servers are used.

    Attributes:
      max_context_len: most tokens of prefix and completion, where that is less than what servers take.
      vocab_len: number of token ids of the model; one outside of it would kill the server.
      session_lifecycle: requests carry the Session's name, and servers are told when it ends.
      recipe, transfer: how weights change; see exchange.py and transfer.py.
      adapter_rank: what changes is an adapter of this rank, on top of weights that stay; None: whole weights.
      lends_memory: `lend_memory` will be used.
      pause: how attempts are paused; None: they can't be.
      pads: placeholders of images, where the checkpoint takes some.
    """

    max_context_len: int | None = None
    vocab_len: int | None = None
    routing: Routing = "least_loaded"
    session_lifecycle: bool = False
    recipe: Recipe = "auto"
    transfer: Transfer = "disk"
    adapter_rank: int | None = None
    lends_memory: bool = False
    pause: PauseMode | None = None
    pads: Pads | None = None


class SGLangBackend:
    """`Backend` over SGLang servers.

    Args:
      checkpoint: directory of the model the run begins with.
      version: its weight version.
      snapshot_dir: where later versions are written.
      keepers: where servers come from.
      options: how they are used.
      decode: token ids → text, special tokens included.
      adapter: directory of the adapter that, on top of `checkpoint`, is what the run begins with; None: there is none.
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
        adapter: Path | None = None,
    ) -> None:
        self._options = options or SGLangOptions()
        saved = None if adapter is None else SavedAdapter(version=version, path=adapter.absolute())
        self._snapshots = Snapshots(snapshot_dir, checkpoint, version if saved is None else _UNDER_ADAPTER, saved)
        self._keepers = tuple(keepers)
        self._decode = decode
        self._fleet = Fleet(self._options.routing)
        self._attempts = Attempts(
            self._fleet,
            names_sessions=self._options.session_lifecycle,
            decode=decode,
            images=ImagePrompts(self._options.pads, decode, version=lambda: self._version),
        )
        update_lock = trio.Lock()
        self._pauses = Pauses(self._fleet, self._attempts, update_lock, self._options.pause or "retract")
        self._handover = Handover(
            self._fleet,
            self._attempts,
            self._snapshots,
            self._pauses,
            update_lock,
            recipe=self._options.recipe,
            transfer=self._options.transfer,
            adapter_rank=self._options.adapter_rank,
            lends_memory=self._options.lends_memory,
        )
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
    def pausing(self) -> Pauses | None:
        """See `Backend`: where it was asked for."""
        return None if self._options.pause is None else self._pauses

    @property
    def servers(self) -> list[Server]:
        """Servers that take work now."""
        return self._fleet.servers

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """See `Backend`.

        Raises:
          BackendUnavailable: no server can be had, at the start or any more; ends with the tail of its log.
          ConfigError: attempts are to be paused on a server that can't.

        Cancellation: attempts under way get BackendUnavailable; own servers are ended, others are told to abort.
        """
        try:
            async with trio.open_nursery() as self._nursery:
                events = [trio.Event() for _ in self._keepers]
                for keeper, event in zip(self._keepers, events, strict=True):
                    keep = partial(keeper.keep, self._fleet, self._snapshots, self._admit, event)
                    self._nursery.start_soon(keep, name="SGLang servers")
                for event in events:
                    await event.wait()  # each has its first server
                self._require_pausing()
                await self._nursery.start(self._attempts.run)
                await self._nursery.start(self._pauses.run)
                task_status.started()
        finally:
            with cleanup_scope(_GOODBYE_S, "attempts on SGLang servers"):
                await self._pauses.say_goodbye()  # first: an abort may be lost by a server that is paused
                await self._attempts.say_goodbye()
                await self._handover.close()
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

        A server that is paused stays so, and attempts there are dealt with in the way of the pause.

        Raises:
          WeightSyncError: the source doesn't fit; or a server refuses it, or refuses to flush its cache. Then servers
            may serve different versions, and the run must end.

        Cancellation: some servers may have the new weights and others not.
        """
        if not self._attempts.is_serving:
            raise WeightSyncError(f"weights {version!r}: the SGLang backend is not serving")
        await self._handover.update(version, source)
        self._version = version

    def lend_memory(self) -> AbstractAsyncContextManager[None]:
        """Have all servers release their GPU memory for the length of the block; see `Handover.lent`."""
        return self._handover.lent()

    async def close_session(self, session_key: str) -> None:
        """See `Backend`: tells every server, where the Session lifecycle is on. Failures are counted, and harmless.

        While attempts are paused, those of the Session may be, and can't end: then servers are told after the pause.

        Cancellation: safe. Takes at most `CLOSE_SESSION_S`.
        """
        await trio.lowlevel.checkpoint()
        if not self._options.session_lifecycle or not self._attempts.is_serving:
            return
        if self._pauses.is_on:
            self._nursery.start_soon(self._close_after_pause, session_key, name=f"close session {session_key}")
        else:
            await self._close_everywhere(session_key)

    def load(self) -> BackendLoad:
        """See `Backend`."""
        n_running = self._attempts.n_running
        return BackendLoad(
            n_running=n_running,
            n_waiting=self._attempts.n_airborne - n_running,
            n_total_tokens=sum(server.info.max_total_tokens for server in self._fleet.servers),
            extra={f"agentic_kv/{name}": float(value) for name, value in self.counts.items()},
        )

    # --- Sessions ---------------------------------------------------------------------------------------------

    async def _close_after_pause(self, session_key: str) -> None:
        await self._pauses.wait_ended()
        await self._close_everywhere(session_key)

    async def _close_everywhere(self, session_key: str) -> None:
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

    async def _close_on(self, server: Server, session_key: str) -> None:
        try:
            await server.client.close_session(session_key)
        except BackendError:
            return  # counted by the caller
        self.counts["session/close"] += 1

    # --- servers and weights ----------------------------------------------------------------------------------

    def _require_pausing(self) -> None:
        """Refuse what is found out too late later: one that comes to the others need not be able to pause."""
        for server in self._fleet.servers:
            if self._options.pause is not None and not server.has_spans:
                raise ConfigError(
                    f"{server.name} (SGLang {server.info.version}) names one version for a whole answer, so weights "
                    "can't change while attempts are paused on it: use --partial-rollout-pause abort"
                )

    async def _admit(self, server: Server, has: WeightVersion | None) -> None:
        """See `Admit`."""
        taken = server.info.max_context_len
        self._max_context_len = min(self._max_context_len or taken, taken)
        await self._handover.admit(server, has)
