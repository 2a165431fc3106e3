"""A backend for tests on the virtual clock: it answers what it is told, at so many tokens a virtual second.

No thread, no torch. Logprobs are -1.0 each. Not covered: answers from a file (scripted.py).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Literal

import trio
from attrs import define, field, frozen

from relax_trio.backend.base import Attempt, AttemptResult, BackendLoad, WeightSource
from relax_trio.backend.refuse import refuse_unfit
from relax_trio.backend.turns import InterruptedTurns
from relax_trio.data.sample import VersionSpan
from relax_trio.errors import BackendError, BackendRejected, BackendUnavailable, EngineFault, WeightSyncError
from relax_trio.ids import Rid, WeightVersion

FAKE_LOGPROB = -1.0

Answers = Sequence[Sequence[int]] | Callable[[Attempt], Sequence[int]]
"""Token ids of each turn: of a Session's turns in order (each Session reads its own copy), or a function of the turn's
first attempt."""


@frozen(kw_only=True)
class FakeCall:
    """One call that the backend took.

    Attributes:
      name: "generate", "abort", "pause", "resume", "update_weights" or "close_session".
      at: seconds on the Trio clock.
      what: rid, version or session key; empty where there is none.
    """

    name: str
    at: float
    what: str


@define(eq=False, kw_only=True)
class _Turn:
    """An attempt under way; `pauses` are from when until when it was paused, `left_s` is what was left when it was."""

    started_at: float
    wait: trio.CancelScope
    aborted: bool = False
    is_wanted_back: bool = False
    error: BackendError | None = None
    left_s: float | None = None
    pauses: list[tuple[float, float]] = field(factory=list)

    def time_of(self, k: int, tokens_per_s: float) -> float:
        """When token k came or comes to be."""
        at = self.started_at + k / tokens_per_s
        for since, until in self.pauses:
            at += until - since if at > since else 0.0
        return at


class FakeBackend:
    """`Backend` without an engine.

    Token k (from 1) of an attempt exists k / `tokens_per_s` seconds after its start, pauses apart. A turn ends with its
    last id (finish "stop"), at the first stop token id, or at `max_new_tokens` ("length").

    Args:
      answers: what turns say.
      tokens_per_s: speed of each attempt; infinite: all at once, after a checkpoint.
      abort_delay_s: how long after its call an abort acts; infinite: it never does.
      max_context_len, vocab_len: limits that attempts are refused by.
      version: weight version at the start.

    Attributes:
      calls: every call in order.
      attempts: every attempt taken, in order.
      is_serving: whether `run` is under way.
      is_paused: whether attempts are paused.
    """

    def __init__(
        self,
        answers: Answers,
        *,
        tokens_per_s: float = math.inf,
        abort_delay_s: float = 0.0,
        max_context_len: int = 32768,
        vocab_len: int | None = None,
        version: str = "0",
    ) -> None:
        self.calls: list[FakeCall] = []
        self.attempts: list[Attempt] = []
        self._answers = answers
        self._tokens_per_s = tokens_per_s
        self._abort_delay_s = abort_delay_s
        self._max_context_len = max_context_len
        self._vocab_len = vocab_len
        self._versions: list[tuple[float, WeightVersion]] = [(-math.inf, WeightVersion(version))]
        self.is_serving = False
        self.is_paused = False
        self._paused_at = -math.inf
        self._running: dict[Rid, _Turn] = {}
        self._n_begun: dict[str, int] = {}
        self._interrupted: InterruptedTurns[tuple[int, ...]] = InterruptedTurns()
        self._errors: list[BackendError] = []
        self._death: EngineFault | None = None
        self._died = trio.Event()

    @property
    def max_context_len(self) -> int:
        """See `Backend`."""
        return self._max_context_len

    @property
    def weight_version(self) -> WeightVersion:
        """See `Backend`."""
        return self._versions[-1][1]

    @property
    def pausing(self) -> FakeBackend:
        """See `Backend`."""
        return self

    @property
    def running(self) -> tuple[Rid, ...]:
        """Attempts under way, in the order they were taken."""
        return tuple(self._running)

    @property
    def remembered(self) -> frozenset[str]:
        """Keys of the Sessions that something is remembered of; `close_session` forgets one."""
        return frozenset(self._n_begun) | self._interrupted.session_keys

    def fail_next(self, error: BackendError) -> None:
        """Let the next attempt that is taken raise `error`; may be called several times."""
        self._errors.append(error)

    def fail(self, rid: Rid, error: BackendError) -> None:
        """Let an attempt under way raise `error`. Unknown rid: nothing happens."""
        turn = self._running.get(rid)
        if turn is not None and turn.error is None:
            turn.error = error
            turn.wait.cancel(reason=f"attempt {rid} fails: {type(error).__name__}")

    def die(self, why: str = "the fake backend died") -> None:
        """Let `run` raise EngineFault, as an engine whose own loop failed; attempts under way end with it."""
        if self._death is None:
            self._death = EngineFault(why)
            self._died.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """See `Backend`."""
        self.is_serving = True
        task_status.started()
        try:
            await self._died.wait()
            assert self._death is not None, "who dies has a cause"
            raise self._death
        finally:
            self.is_serving = False
            for rid in self.running:
                self.fail(rid, BackendUnavailable(f"attempt {rid}: the fake backend ended"))

    async def generate(self, attempt: Attempt) -> AttemptResult:
        """See `Backend`. Cancellation: acts at once; the turn's answer is kept for an attempt at the same turn."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self.is_serving:
            raise BackendUnavailable(f"attempt {attempt.rid}: the fake backend is not serving")
        refuse_unfit(attempt, running=self._running, max_context_len=self._max_context_len, vocab_len=self._vocab_len)
        self._note("generate", attempt.rid)
        self.attempts.append(attempt)
        if self._errors:
            error = self._errors.pop(0)
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise error
        answer = self._interrupted.take(attempt, lambda: self._begin(attempt))
        ids, finish = _rest(attempt, answer)
        now = trio.current_time()
        turn = _Turn(started_at=now, wait=trio.CancelScope(deadline=now + len(ids) / self._tokens_per_s))
        self._running[attempt.rid] = turn
        if self.is_paused:
            self._hold(turn)
        finished = False
        try:
            with turn.wait:
                await trio.sleep_forever()
            if turn.error is not None:
                raise turn.error
            result = self._result(turn, ids, finish)
            finished = not turn.aborted
            return result
        finally:
            del self._running[attempt.rid]
            if not finished:
                self._interrupted.put_back(attempt, answer)

    async def abort(self, rid: Rid) -> None:
        """See `Backend`."""
        self._note("abort", rid)
        turn = self._running.get(rid)
        if turn is not None and turn.left_s is not None:
            turn.is_wanted_back = True
        elif turn is not None:
            self._call_back(turn)
        await trio.lowlevel.checkpoint()

    async def pause(self) -> None:
        """See `Pausing`. An abort acts when `resume` is called, or later."""
        if not self.is_paused:
            self._note("pause", "")
            self.is_paused, self._paused_at = True, trio.current_time()
            for turn in self._running.values():
                self._hold(turn)
        await trio.lowlevel.checkpoint()

    async def resume(self) -> None:
        """See `Pausing`."""
        if self.is_paused:
            self._note("resume", "")
            self.is_paused, now = False, trio.current_time()
            for turn in self._running.values():
                self._release(turn, now)
        await trio.lowlevel.checkpoint()

    async def update_weights(self, version: WeightVersion, source: WeightSource) -> None:
        """See `Backend`."""
        self._note("update_weights", version)
        await trio.lowlevel.checkpoint()
        if source.tensors is None and source.path is None:
            raise WeightSyncError("a weight source needs tensors or a path; this one has neither")
        self._versions.append((trio.current_time(), version))

    async def close_session(self, session_key: str) -> None:
        """See `Backend`. Cancelled before, it does not happen: who has to tell the end shields the call."""
        await trio.lowlevel.checkpoint()
        self._note("close_session", session_key)
        self._interrupted.close_session(session_key)
        self._n_begun.pop(session_key, None)

    def load(self) -> BackendLoad:
        """See `Backend`."""
        return BackendLoad(n_running=len(self._running), n_waiting=0)

    def _hold(self, turn: _Turn) -> None:
        """Stop a turn, unless its last token exists by now."""
        left_s = turn.wait.deadline - trio.current_time()
        if left_s > 0 or turn.started_at == trio.current_time():
            turn.wait.deadline, turn.left_s = math.inf, left_s

    def _release(self, turn: _Turn, now: float) -> None:
        if turn.left_s is None:
            return
        if turn.started_at >= self._paused_at:
            turn.started_at = now  # it has not begun
        else:
            turn.pauses.append((self._paused_at, now))
        turn.wait.deadline, turn.left_s = now + turn.left_s, None
        if turn.is_wanted_back:
            self._call_back(turn)

    def _call_back(self, turn: _Turn) -> None:
        acts_at = trio.current_time() + self._abort_delay_s
        if acts_at < turn.wait.deadline:
            turn.aborted = True
            turn.wait.deadline = acts_at

    def _note(self, name: str, what: str) -> None:
        self.calls.append(FakeCall(name=name, at=trio.current_time(), what=what))

    def _begin(self, attempt: Attempt) -> tuple[int, ...]:
        if callable(self._answers):
            return tuple(self._answers(attempt))
        number = self._n_begun.get(attempt.session_key, 0)
        if number >= len(self._answers):
            raise BackendRejected(f"attempt {attempt.rid}: the fake backend has no answer {number + 1}")
        self._n_begun[attempt.session_key] = number + 1
        return tuple(self._answers[number])

    def _result(self, turn: _Turn, ids: Sequence[int], finish: Literal["stop", "length"]) -> AttemptResult:
        n_done = len(ids)
        if turn.aborted:
            # What exists by now; the sliver makes up for rounding in the product.
            spent_s = trio.current_time() - turn.started_at - sum(until - since for since, until in turn.pauses)
            n_done = min(n_done, int(spent_s * self._tokens_per_s + 1e-6))
        return AttemptResult(
            token_ids=array("i", ids[:n_done]),
            logprobs=array("d", [FAKE_LOGPROB] * n_done),
            finish="abort" if turn.aborted else finish,
            versions=self._spans(turn, n_done),
            cached_len=0,
        )

    def _spans(self, turn: _Turn, n_tokens: int) -> tuple[VersionSpan, ...]:
        """Token k carries the version in force when it came to be."""
        spans: list[VersionSpan] = []
        for k in range(1, n_tokens + 1):
            made_at = turn.time_of(k, self._tokens_per_s)
            version = next(version for since, version in reversed(self._versions) if since <= made_at)
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(version=version, n_tokens=spans[-1].n_tokens + 1)
            else:
                spans.append(VersionSpan(version=version, n_tokens=1))
        return tuple(spans)


def _rest(attempt: Attempt, answer: Sequence[int]) -> tuple[list[int], Literal["stop", "length"]]:
    """What is left of the turn's answer after the tokens the attempt already carries."""
    ids = list(answer[len(attempt.token_ids) - attempt.response_start :])
    stops = frozenset(attempt.sampling.stop_token_ids)
    end = next((at + 1 for at, token in enumerate(ids) if token in stops), len(ids))
    limit = attempt.sampling.max_new_tokens
    return (ids[:end], "stop") if end <= limit else (ids[:limit], "length")
