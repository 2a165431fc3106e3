"""How the API sees the runtime: a directory of Sessions, a Session, a call. Protocols; the runtime implements them.

The API is the front half: it finds the Session, submits, waits and writes. What a call costs, how long it goes on
without a client and which call a retry joins are the Session's matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from attrs import frozen

from relax_trio.api.history import HistoryMemo
from relax_trio.data.json import JsonObject
from relax_trio.data.request import CanonicalRequest, Completion
from relax_trio.ids import PlaceId


class CallPort(Protocol):
    """One accepted model request, as one HTTP request holds it.

    Several HTTP requests may hold one call (a retry joins it, perhaps before the first connection is seen to break).
    Each ends its hold by exactly one `detach` or `delivered`, whatever happens.
    """

    async def wait_begun(self) -> None:
        """Wait until the request was matched, encoded and found to fit: an answer may begin with status 200.

        Takes no longer than the encoding; never waits for a lease, a gate or the engine.

        Raises:
          ProtocolError: the request was refused before it began, or ended otherwise.

        Cancellation: safe at any time; the call goes on.
        """
        ...

    async def wait_done(self) -> Completion:
        """Wait for the committed turn.

        Raises:
          ProtocolError: the request was refused, failed, or its Session ended.

        Cancellation: safe at any time; the call goes on.
        """
        ...

    def detach(self) -> None:
        """The client went before its last byte: the retry grace begins. Never blocks."""
        ...

    def delivered(self) -> None:
        """The last byte of the reply, an error reply too, went to the transport. Never blocks."""
        ...


class SessionPort(Protocol):
    """One live Session."""

    @property
    def place(self) -> PlaceId:
        """Public name, used in reply ids and events."""
        ...

    @property
    def histories(self) -> HistoryMemo:
        """What its requests began with."""
        ...

    def submit(self, request: CanonicalRequest) -> CallPort:
        """Accept a request, or join the call that a marked retry repeats. Never blocks.

        Raises:
          ProtocolError: refused; nothing was begun.
        """
        ...

    async def count_tokens(self, request: CanonicalRequest) -> int:
        """Tokens of the prompt that `request` would be served from. Generates nothing and leaves no trace.

        Raises:
          ProtocolError: the request can't be encoded, or the Session has ended.

        Cancellation: safe.
        """
        ...

    def debug_state(self, *, forest: bool) -> JsonObject:
        """State of this Session, with `forest` also its nodes."""
        ...


@frozen(kw_only=True)
class Statistics:
    """What is alive now.

    Attributes:
      n_sessions: live Sessions.
      n_requests: their open requests by what each waits for.
      n_attempts: attempts that the backend has.
    """

    n_sessions: int
    n_requests: Mapping[str, int]
    n_attempts: int


class SessionDirectory(Protocol):
    """Every live Session, by credential."""

    @property
    def closing(self) -> bool:
        """Whether new model requests are refused because the run is ending."""
        ...

    def find(self, credential: str) -> SessionPort | None:
        """The Session that `credential` opens, compared in constant time; None if it ended or never was."""
        ...

    def debug_state(self, *, forest: bool) -> JsonObject:
        """State of the whole run; shown to the operator only."""
        ...

    def statistics(self) -> Statistics:
        """Counts over the whole run; shown to the operator only."""
        ...
