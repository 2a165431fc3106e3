"""One attempt on its way through a server: its legs so far, and whether somebody wants it back. Plain state."""

from __future__ import annotations

from array import array

import trio
from attrs import define, field
from outcome import Outcome

from relax_trio.backend.base import Attempt, AttemptResult
from relax_trio.backend.sglang.fleet import LoadedAdapter, Server
from relax_trio.backend.sglang.wire import Finish, Leg
from relax_trio.data.sample import VersionSpan


@define(eq=False, kw_only=True)
class LegInFlight:
    """A `/generate` call that has not answered yet.

    Attributes:
      rid: its name on the server.
      adapter: what its tokens are of; that of the server when it was sent.
      landed: set when it is over, however.
      is_called_back: an abort was asked for.
    """

    server: Server
    rid: str
    sent_s: float = field(factory=trio.current_time)
    adapter: LoadedAdapter | None = field(init=False)
    landed: trio.Event = field(factory=trio.Event)
    is_called_back: bool = False

    def __attrs_post_init__(self) -> None:
        self.adapter = self.server.adapter


@define(eq=False, kw_only=True)
class Flight:
    """An attempt from its start to its result.

    Attributes:
      token_ids, logprobs, versions: of the legs that have landed.
      leg: the one in flight, if any.
      waiting: scope of a wait for a server or for new weights; cancelled to end that wait.
      is_aborted: the caller wants what there is.
      ending: what the caller gets.
      done: set with it.
    """

    attempt: Attempt
    token_ids: array[int] = field(factory=lambda: array("i"))
    logprobs: array[float] = field(factory=lambda: array("d"))
    versions: list[VersionSpan] = field(factory=list)
    cached_len: int | None = None
    stop_string: str | None = None
    leg: LegInFlight | None = None
    waiting: trio.CancelScope | None = None
    is_aborted: bool = False
    done: trio.Event = field(factory=trio.Event)
    ending: Outcome[AttemptResult] | None = None

    @property
    def n_left(self) -> int:
        """New tokens that may still come."""
        return self.attempt.sampling.max_new_tokens - len(self.token_ids)

    def keep(self, leg: Leg) -> None:
        """Append what a leg brought."""
        if self.cached_len is None:
            self.cached_len = leg.cached_len
        self.token_ids.extend(leg.token_ids)
        self.logprobs.extend(leg.logprobs)
        for span in leg.versions:
            if self.versions and self.versions[-1].version == span.version:
                span = VersionSpan(version=span.version, n_tokens=self.versions.pop().n_tokens + span.n_tokens)
            self.versions.append(span)
        self.stop_string = leg.stop_string

    def result(self, finish: Finish) -> AttemptResult:
        """What there is."""
        return AttemptResult(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish=finish,
            versions=tuple(self.versions),
            stop_string=self.stop_string,
            cached_len=self.cached_len or 0,
        )

    def call_back(self) -> None:
        """Note that the caller wants what there is, and end a wait that has nothing to bring."""
        self.is_aborted = True
        if self.waiting is not None:
            self.waiting.cancel(reason=f"attempt {self.attempt.rid} was aborted")

    def settle(self, result: Outcome[AttemptResult]) -> None:
        """Set the ending and wake the caller; the first one stands."""
        if self.ending is None:
            self.ending = result
            self.done.set()
