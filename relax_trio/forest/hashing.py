"""Identity of a conversation state: a chain of SHA-256 values over its canonical messages.

    root  = H(canonical JSON of tools and template arguments)
    state = H(previous state ‖ message hash)

A request of n messages costs n message hashes, whatever was committed before. Equality of states is equality of
normalized messages, tools and template arguments; nothing else (tokens, time, protocol) enters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

from relax_trio.data.json import JsonObject, JsonValue, canonical_json
from relax_trio.data.messages import Content, Message, TextPart
from relax_trio.ids import StateHash

_NONE: Final = b"-"
_ROOT_TAG: Final = "root"


def root_state(tools: Sequence[JsonObject], chat_template_kwargs: JsonObject) -> StateHash:
    """State before the first message. Key order does not matter.

    Raises:
      ValueError, TypeError: not JSON (normalization has refused that before).
    """
    listed: list[JsonValue] = list(tools)
    text = canonical_json([_ROOT_TAG, listed, chat_template_kwargs])
    return StateHash(hashlib.sha256(text.encode()).digest())


def next_state(state: StateHash, digest: bytes) -> StateHash:
    """State after one more message with hash `digest`."""
    return StateHash(hashlib.sha256(state + digest).digest())


def chain(state: StateHash, messages: Iterable[Message]) -> list[StateHash]:
    """States after each of `messages` in turn, beginning from `state`."""
    states: list[StateHash] = []
    for message in messages:
        state = next_state(state, message_hash(message))
        states.append(state)
    return states


def message_hash(message: Message) -> bytes:
    """Hash of one canonical message (32 bytes), independent of what stands before it.

    Absent content counts as "": normalization leaves only one of the two possible beside calls or reasoning.
    """
    return _digest(message, message.reasoning_content)


def visible_hash(message: Message) -> bytes:
    """Hash of what a client that drops reasoning sends back for `message`."""
    return _digest(message, None)


def _digest(message: Message, reasoning: str | None) -> bytes:
    parts = [message.role.encode(), _content(message.content), _text(reasoning), _text(message.tool_call_id)]
    for call in message.tool_calls:
        parts += [_text(call.id), _text(call.name), _text(call.arguments)]
    return hashlib.sha256(b"".join(parts)).digest()


def _content(content: Content) -> bytes:
    if content is None or isinstance(content, str):
        return _text(content or "")
    pieces = [b"t" + _text(part.text) if isinstance(part, TextPart) else b"i" + _text(part.url) for part in content]
    return b"[%d:" % len(pieces) + b"".join(pieces)


def _text(text: str | None) -> bytes:
    """Length-prefixed, so that no two field lists share one byte string."""
    if text is None:
        return _NONE
    data = text.encode()
    return b"%d:" % len(data) + data
