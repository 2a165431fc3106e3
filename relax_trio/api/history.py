"""What a Session's earlier requests began with, so that a long history is read once and not with every turn.

A model API sends the whole conversation each time, and clients write the part that they sent before in the same bytes.
Such a body is taken apart only behind its known beginning. Every other body, and every one that is malformed, is read
whole: what is remembered never changes what a body means.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Final

from attrs import define, evolve, field, frozen

from relax_trio.api.body import check_depth, parse_body
from relax_trio.data.json import JSON_DECODER, JsonObject, JsonValue
from relax_trio.data.messages import Message

_MOST_HISTORIES: Final = 4
"""Conversations of one Session (an agent with sub-agents) whose histories are remembered side by side."""

_MOST_BYTES: Final = 4 * 1024 * 1024
"""Of remembered bodies in one Session."""

_SPACE: Final = b" \t\n\r"
_WHITESPACE: Final = re.compile(r"[ \t\n\r]*")


@frozen(kw_only=True)
class History:
    """The beginning of a body, up to the end of a message of its history.

    Attributes:
      path: where it was posted to.
      prefix: the bytes; they end with the last message that was read.
      list_at: where in them the first message may begin.
      n_items: messages in it as the client counts them.
      messages: what they were read as; leading system messages may be one.
      tools_text, tools: the request's tools as written, and what they were read as; None as the beginning of a body
        that has others.
      digest: SHA-256 object that was fed with path and prefix; copy it before use.
    """

    path: str
    prefix: bytes
    list_at: int
    n_items: int
    messages: tuple[Message, ...]
    tools_text: str
    tools: tuple[JsonObject, ...] | None
    digest: hashlib._Hash


@frozen(kw_only=True)
class Body:
    """A request body, taken apart.

    Attributes:
      value: its JSON; without the messages of `known`, which stand before those that it has.
      known: its known beginning, None where it was read whole.
      digest: SHA-256 of path and body.
    """

    value: JsonValue
    known: History | None
    digest: bytes
    _path: str
    _raw: bytes
    _list_at: int | None = None
    _n_items: int = 0
    _tail_len: int = 0
    _tools_text: str = ""

    def history(self, messages: tuple[Message, ...], tools: tuple[JsonObject, ...]) -> History | None:
        """What to remember of it, once it was read; None where there is nothing to gain.

        Args:
          messages: what its history was read as, the messages of `known` included.
          tools: what its tools were read as.
        """
        if self._list_at is None or self._n_items == 0:
            return None
        known = self.known
        prefix = self._raw[: len(self._raw) - self._tail_len]
        fed = _fed(self._path) if known is None else known.digest.copy()
        fed.update(memoryview(prefix)[0 if known is None else len(known.prefix) :])
        return History(
            path=self._path,
            prefix=prefix,
            list_at=self._list_at,
            n_items=self._n_items + (0 if known is None else known.n_items),
            messages=messages,
            tools_text=self._tools_text,
            tools=tools,
            digest=fed,
        )


@define(eq=False)
class HistoryMemo:
    """The histories of one Session, newest last. At most `_MOST_HISTORIES`, and `_MOST_BYTES` of them."""

    _histories: list[History] = field(factory=list)

    def find(self, path: str, body: bytes) -> History | None:
        """The longest remembered beginning of `body`."""
        fitting = [known for known in self._histories if known.path == path and body.startswith(known.prefix)]
        return max(fitting, key=lambda known: len(known.prefix), default=None)

    def clear(self) -> None:
        """Forget them."""
        self._histories = []

    def remember(self, history: History, *, behind: History | None) -> None:
        """Keep `history`; the one that it goes on from, `behind`, makes room for it."""
        kept = [known for known in self._histories if known is not behind]
        kept = [*kept, history][-_MOST_HISTORIES:]
        while sum(len(known.prefix) for known in kept) > _MOST_BYTES:
            kept.pop(0)
        self._histories = kept


def read_json(path: str, raw: bytes, *, known: History | None, key: str | None) -> Body:
    """Take a body apart.

    Args:
      path: where it was posted to.
      known: its known beginning, from `HistoryMemo.find`.
      key: the field that holds the history, None where this API's histories are not remembered.

    Raises:
      InvalidRequest: as `parse_body`.
    """
    parts = None if known is None or key is None else _behind(raw, known, key)
    if parts is None:
        known = None
        parts = None if key is None else _walk(raw, key)
    fed = _fed(path) if known is None else known.digest.copy()
    fed.update(memoryview(raw)[0 if known is None else len(known.prefix) :])
    if parts is None:
        return Body(value=parse_body(raw), known=None, digest=fed.digest(), path=path, raw=raw)
    check_depth(parts.value)
    if known is not None and known.tools_text != parts.tools_text:
        known = evolve(known, tools=None)
    return Body(
        value=parts.value,
        known=known,
        digest=fed.digest(),
        path=path,
        raw=raw,
        tools_text=parts.tools_text,
        list_at=parts.list_at if known is None else known.list_at,
        n_items=parts.n_items,
        tail_len=parts.tail_len,
    )


def _fed(path: str) -> hashlib._Hash:
    return hashlib.sha256(path.encode() + b"\0")


@frozen
class _Parts:
    """An object, and of the list in it: where in the text its first item may begin, its length, and the length of the
    text behind its last; and the text of its tools, "" where there is no such field.
    """

    value: JsonObject
    list_at: int
    n_items: int
    tail_len: int
    tools_text: str


def _behind(raw: bytes, known: History, key: str) -> _Parts | None:
    """The parts of `raw` without the messages of `known`; None where it has to be read whole."""
    rest = raw[len(known.prefix) :].lstrip(_SPACE)
    if rest[:1] == b",":
        rest = rest[1:].lstrip(_SPACE)
        if rest[:1] == b"]":  # a comma too many: no JSON
            return None
    elif rest[:1] != b"]":
        return None
    return _walk(raw[: known.list_at] + rest, key)


def _walk(raw: bytes, key: str) -> _Parts | None:
    """Read an object field by field, to learn where the list `key` stands.

    None where it is anything but an object with one such field, a list. What is malformed is refused by the parser that
    then reads the whole, and says where.
    """
    try:
        text = raw.decode()
        value, spans = _fields(text)
    except (ValueError, RecursionError):
        return None
    items, found = value.get(key), [span for name, *span in spans if name == key]
    if len(found) != 1 or not isinstance(items, list):
        return None
    start, end = found[0]
    behind = len(text[: end - 1].rstrip(" \t\n\r"))
    tools_text = "".join(text[start:end] for name, start, end in spans if name == "tools")
    return _Parts(value, len(text[: start + 1].encode()), len(items), len(text[behind:].encode()), tools_text)


def _fields(text: str) -> tuple[JsonObject, Sequence[tuple[str, int, int]]]:
    """The object that `text` is, and of each field in it the name and where its value begins and ends.

    Raises:
      ValueError: `text` is no object.
    """
    value: JsonObject = {}
    spans: list[tuple[str, int, int]] = []
    at, is_more = _behind_mark(text, _behind_space(text, 0), "{"), True
    while is_more:
        name, at = JSON_DECODER.raw_decode(text, at)
        if not isinstance(name, str):
            raise ValueError("a field's name is a string")
        start = _behind_mark(text, _behind_space(text, at), ":")
        value[name], end = JSON_DECODER.raw_decode(text, start)
        spans.append((name, start, end))
        at = _behind_space(text, end)
        is_more = text[at : at + 1] == ","
        at = _behind_mark(text, at, "," if is_more else "}")
    if at != len(text):
        raise ValueError("something behind the object")
    return value, spans


def _behind_mark(text: str, at: int, mark: str) -> int:
    if text[at : at + 1] != mark:
        raise ValueError(f"no {mark}")
    return _behind_space(text, at + 1)


def _behind_space(text: str, at: int) -> int:
    found = _WHITESPACE.match(text, at)
    return at if found is None else found.end()
