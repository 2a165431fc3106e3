"""What a protocol dialect is: everything that differs between the model APIs, and nothing else.

A dialect is chosen by the path that a client posts to. It is pure and stateless: bytes, clocks and Sessions are the
front half's. A new API is a new module with one class of this shape and one line in app.py.
"""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Protocol

from attrs import field, frozen

from relax_trio.api.history import History
from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.request import CanonicalRequest, Completion
from relax_trio.errors import ProtocolError


@frozen(kw_only=True)
class ParsedRequest:
    """A request without its dialect, and what its reply has to know of it.

    Attributes:
      request: what the Session gets.
      stream: answer as buffered SSE instead of JSON.
      echo: fields that the dialect's reply repeats; empty where it repeats none.
    """

    request: CanonicalRequest
    stream: bool = False
    echo: JsonObject = field(factory=dict)


class Dialect(Protocol):
    """One model API on the wire."""

    @property
    def history_key(self) -> str | None:
        """The field whose list of messages is remembered from one request to the next; None where none is."""
        ...

    def parse(
        self,
        body: JsonValue,
        *,
        digest: bytes,
        retry: bool,
        template_variables: Container[str] = frozenset(),
        known: History | None = None,
    ) -> ParsedRequest:
        """Read a request body.

        Args:
          body: the parsed JSON of the body, any type.
          digest: see `CanonicalRequest.digest`.
          retry: the client marked this request as a retry.
          template_variables: names that the checkpoint's chat template reads: what a request says of reasoning becomes
            a template argument only where there is one.
          known: what stands before the messages in `body`; never given where `history_key` is None.

        Raises:
          InvalidRequest: with `param` naming the field.
        """
        ...

    def render(self, completion: Completion, parsed: ParsedRequest, *, name: str) -> JsonObject:
        """The JSON reply.

        Args:
          name: public name of the call, unique in the run and the same for a joined retry; ids are made from it.
        """
        ...

    def error(self, error: ProtocolError) -> JsonObject:
        """The error envelope."""
        ...

    def sse_open(self, parsed: ParsedRequest) -> bytes:
        """The frame that goes out at once."""
        ...

    def sse_heartbeat(self) -> bytes:
        """The frame that keeps the connection alive while the turn is generated."""
        ...

    def sse_done(self, completion: Completion, parsed: ParsedRequest, *, name: str) -> bytes:
        """The whole terminal sequence of a finished turn."""
        ...

    def sse_failed(self, error: ProtocolError, parsed: ParsedRequest) -> bytes:
        """The whole terminal sequence of a failed turn."""
        ...


def reply_bytes(value: JsonObject) -> bytes:
    """JSON as it goes out: compact, UTF-8. Texts hold no lone surrogates: what came in was cleaned."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def sse_data(value: JsonObject, *, event: str | None = None) -> bytes:
    """One SSE frame. JSON text never holds a raw line break, so one data line is enough."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + reply_bytes(value) + b"\n\n"


def sse_comment(text: str) -> bytes:
    """A frame that every client ignores."""
    return b": " + text.encode() + b"\n\n"
