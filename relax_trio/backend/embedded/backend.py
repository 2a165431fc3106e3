"""The embedded engine as a `Backend`: the Trio side of one engine thread.

Owns the thread's life, what is waited for, and what is refused before it gets there. Not covered: the work itself
(engine.py).
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TypeVar

import outcome
import torch
import trio
from attrs import field, frozen

from relax_trio.backend.base import Attempt, AttemptResult, BackendLoad, WeightSource
from relax_trio.backend.embedded.check import check_decoding
from relax_trio.backend.embedded.commands import Abort, CloseSession, Finished, Job, Stop, Submit, Update
from relax_trio.backend.embedded.engine import Engine
from relax_trio.backend.embedded.model import CausalModel, ModelInfo
from relax_trio.backend.embedded.passes import EngineLimits
from relax_trio.backend.embedded.rows import Decode
from relax_trio.backend.refuse import refuse_unfit
from relax_trio.errors import (
    BackendRejected,
    BackendUnavailable,
    ConfigError,
    EngineFault,
    RelaxTrioError,
    WeightSyncError,
)
from relax_trio.events import emit
from relax_trio.ids import Rid, WeightVersion
from relax_trio.sync.cleanup import cleanup_scope

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CACHE_BYTES = 512 * 1024 * 1024
_UPDATE_CLEANUP_S = 30.0

T = TypeVar("T")


@frozen(kw_only=True)
class EmbeddedOptions:
    """How the embedded engine runs.

    Attributes:
      max_batch: attempts that decode together; others wait.
      max_context_len: most tokens of prefix and completion; None: what the model was made for.
      max_cached_tokens: tokens of ended attempts kept for later turns; None: what fits in 512 MiB.
      dtype: "float32" or "bfloat16".
      n_threads: torch threads of the engine thread; None: torch's own choice. On few cores that agents use too, 1 is
        best: threads that wait for each other lose more than they win.
      deterministic: results independent of what else runs.
      device: torch device.
      version: weight version of the checkpoint as loaded.
    """

    max_batch: int = 64
    max_context_len: int | None = None
    max_cached_tokens: int | None = None
    dtype: str = "float32"
    n_threads: int | None = None
    deterministic: bool = False
    device: str = "cpu"
    version: WeightVersion = field(default=WeightVersion("0"))


class EmbeddedBackend:
    """`Backend` over torch and a transformers causal LM in this process.

    Args:
      checkpoint: a local Hugging Face checkpoint directory.
      options: sizes and switches.
      decode: token ids → text, special tokens included; attempts with stop strings are refused without it.

    Raises:
      ConfigError: the directory holds no causal LM that the engine can serve.
    """

    def __init__(
        self, checkpoint: Path, options: EmbeddedOptions | None = None, *, decode: Decode | None = None
    ) -> None:
        self._options = options or EmbeddedOptions()
        if self._options.dtype not in _DTYPES:
            raise ConfigError(f"embedded engine: no dtype {self._options.dtype!r}; choose from {', '.join(_DTYPES)}")
        self._info = ModelInfo(checkpoint)
        self._decode = decode
        self._max_context_len = min(self._info.max_position, self._options.max_context_len or self._info.max_position)
        self._version = self._options.version
        self._engine: Engine | None = None
        self._limits: EngineLimits | None = None
        self._jobs: dict[Rid, Job] = {}
        self._updates: list[Update] = []

    @property
    def max_context_len(self) -> int:
        """See `Backend`."""
        return self._max_context_len

    @property
    def weight_version(self) -> WeightVersion:
        """See `Backend`."""
        return self._version

    @property
    def pausing(self) -> None:
        """See `Backend`: they can't be; an aborted one goes on from what it has."""
        return None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load the weights, then serve until cancelled; `started()` once attempts can be taken.

        Raises:
          ConfigError: the weights can't be loaded or the architecture can't be served.
          EngineFault: the engine thread failed; attempts under way get BackendUnavailable.

        Cancellation: takes effect after the step under way, or after loading; the thread is joined.
        """
        limiter = trio.CapacityLimiter(1)
        self._version = self._options.version
        loaded = await trio.to_thread.run_sync(outcome.capture, self._load, limiter=limiter)
        model = _unwrap(loaded, "loading the model")
        engine = self._engine = self._make_engine(model, trio.lowlevel.current_trio_token())
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_stop_when_cancelled, engine, name="embedded engine: stop")
                task_status.started()
                ended = await trio.to_thread.run_sync(outcome.capture, self._work, engine, limiter=limiter)
                nursery.cancel_scope.cancel(reason="the engine thread ended")
        finally:
            self._engine = None
            self._end_all()
        _unwrap(ended, "the engine thread")

    async def generate(self, attempt: Attempt) -> AttemptResult:
        """See `Backend`. Cancellation: the engine is told, and ends the attempt before its next step."""
        await trio.lowlevel.checkpoint_if_cancelled()
        engine = self._serving(f"attempt {attempt.rid}")
        self._check(attempt)
        seed = secrets.randbits(64) if attempt.sampling.seed is None else attempt.sampling.seed % 2**64
        done = trio.Event()
        job = Job(attempt=attempt, seed=seed, wake=done.set)
        self._jobs[attempt.rid] = job
        engine.put(Submit(job))
        try:
            await done.wait()
        finally:
            if self._jobs.get(attempt.rid) is job:
                del self._jobs[attempt.rid]
            if job.result is None:
                engine.put(Abort(job))
        assert job.result is not None, "a job wakes its waiter after its result is set"
        return job.result.unwrap()

    async def abort(self, rid: Rid) -> None:
        """See `Backend`."""
        job = self._jobs.get(rid)
        if job is not None and self._engine is not None:
            self._engine.put(Abort(job))
        await trio.lowlevel.checkpoint()

    async def update_weights(self, version: WeightVersion, source: WeightSource) -> None:
        """See `Backend`.

        Raises:
          WeightSyncError: the source doesn't fit, or the engine is not serving; the old weights stay.

        Cancellation: an update that has not begun is withdrawn; one that has is waited for, at most 30 s.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        engine = self._engine
        if engine is None:
            raise WeightSyncError(f"weights {version!r}: the embedded engine is not serving")
        done = trio.Event()
        update = Update(version=version, source=source, wake=done.set)
        self._updates.append(update)
        engine.put(update)
        try:
            await done.wait()
        finally:
            if update.result is None and not update.claim():
                # The thread reads the source's tensors: their owner must not go on before it has finished.
                with cleanup_scope(_UPDATE_CLEANUP_S, f"weights {version}"):
                    await done.wait()
            self._updates.remove(update)
        assert update.result is not None, "an update wakes its waiter after its result is set"
        update.result.unwrap()

    async def close_session(self, session_key: str) -> None:
        """See `Backend`."""
        if self._engine is not None:
            self._engine.put(CloseSession(session_key))
        await trio.lowlevel.checkpoint()

    def load(self) -> BackendLoad:
        """See `Backend`."""
        engine, limits = self._engine, self._limits
        if engine is None or limits is None:
            return BackendLoad(n_running=0, n_waiting=0)
        n_running = engine.n_running
        return BackendLoad(
            n_running=n_running,
            n_waiting=max(0, len(self._jobs) - n_running),
            n_cached_tokens=engine.n_cached_tokens,
            n_total_tokens=limits.max_cached_tokens + limits.max_batch * limits.max_context_len,
        )

    # --- the thread -------------------------------------------------------------------------------------------

    def _load(self) -> CausalModel:
        self._set_threads()
        model = CausalModel(self._info, dtype=_DTYPES[self._options.dtype], device=torch.device(self._options.device))
        check_decoding(model)
        return model

    def _work(self, engine: Engine) -> None:
        self._set_threads()
        engine.run()

    def _set_threads(self) -> None:
        if self._options.n_threads is not None:
            torch.set_num_threads(self._options.n_threads)

    def _make_engine(self, model: CausalModel, token: trio.lowlevel.TrioToken) -> Engine:
        cached = self._options.max_cached_tokens
        self._limits = EngineLimits(
            max_batch=self._options.max_batch,
            max_context_len=self._max_context_len,
            max_cached_tokens=_CACHE_BYTES // model.spec.bytes_per_token if cached is None else cached,
            deterministic=self._options.deterministic,
        )

        def deliver(finished: list[Finished]) -> None:
            token.run_sync_soon(self._deliver, finished)

        return Engine(model, self._limits, version=self._version, decode=self._decode, deliver=deliver)

    # --- the Trio side ----------------------------------------------------------------------------------------

    def _deliver(self, finished: list[Finished]) -> None:
        for item, result in finished:
            if item.result is not None:
                continue
            if isinstance(item, Update) and isinstance(result, outcome.Value):
                self._version = item.version
                emit("weights.updated", version=item.version)
            item.result = result
            item.wake()

    def _end_all(self) -> None:
        """The engine is gone: whoever waits is told."""
        gone = "the embedded engine ended"
        self._deliver(
            [(job, outcome.Error(BackendUnavailable(f"attempt {rid}: {gone}"))) for rid, job in self._jobs.items()]
        )
        self._deliver(
            [
                (update, outcome.Error(WeightSyncError(f"weights {update.version!r}: {gone}")))
                for update in self._updates
            ]
        )

    def _serving(self, what: str) -> Engine:
        if self._engine is None:
            raise BackendUnavailable(f"{what}: the embedded engine is not serving")
        return self._engine

    def _check(self, attempt: Attempt) -> None:
        refuse_unfit(
            attempt,
            running=self._jobs,
            max_context_len=self._max_context_len,
            vocab_len=self._info.vocab_len,
        )
        if attempt.sampling.stop and self._decode is None:
            raise BackendRejected(f"attempt {attempt.rid}: stop strings need a backend that was given a decoder")


async def _stop_when_cancelled(engine: Engine) -> None:
    try:
        await trio.sleep_forever()
    finally:
        engine.put(Stop())


def _unwrap(result: outcome.Outcome[T], what: str) -> T:
    """The value of something done in the thread; what is no expected error is a fault of the engine."""
    if isinstance(result, outcome.Error) and not isinstance(result.error, RelaxTrioError):
        error = result.error
        raise EngineFault(f"embedded engine: {what} failed: {type(error).__name__}: {error}") from error
    return result.unwrap()
