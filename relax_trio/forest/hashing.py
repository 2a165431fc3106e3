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
from relax_trio.data.messages import Message, Part, TextPart
from relax_trio.ids import StateHash

_ROOT_TAG: Final = "root"
_PREFILL_TAG: Final = b"prefill"
_sha256 = hashlib.sha256


def root_state(tools: Sequence[JsonObject], chat_template_kwargs: JsonObject) -> StateHash:
    """State before the first message. Key order does not matter.

    Raises:
      ValueError, TypeError: not JSON (normalization has refused that before).
    """
    listed: list[JsonValue] = list(tools)
    text = canonical_json([_ROOT_TAG, listed, chat_template_kwargs])
    return StateHash(_sha256(text.encode()).digest())


def next_state(state: StateHash, digest: bytes) -> StateHash:
    """State after one more message with hash `digest`."""
    return StateHash(_sha256(state + digest).digest())


def prefilled_state(state: StateHash, prefill: str) -> StateHash:
    """State after the request of `state` and the beginning of an answer. No request of messages alone has it."""
    return StateHash(_sha256(state + _PREFILL_TAG + prefill.encode()).digest())


def chain(state: StateHash, digests: Iterable[bytes]) -> list[StateHash]:
    """`state`, then the states after each message hash of `digests` in turn."""
    states = [state]
    for digest in digests:
        state = StateHash(_sha256(state + digest).digest())
        states.append(state)
    return states


def message_hash(message: Message) -> bytes:
    """Hash of one canonical message (32 bytes), independent of what stands before it.

    Absent content counts as "": normalization leaves only one of the two possible beside calls or reasoning.
    """
    content = message.content
    plain = not message.tool_calls and message.reasoning_content is None and message.tool_call_id is None
    if plain and isinstance(content, str):  # most messages; as `_digest` would, without its copies of the text
        return _sha256(f"{message.role}{len(content)}:{content}--".encode()).digest()
    return _digest(message, message.reasoning_content)


def visible_hash(message: Message) -> bytes:
    """Hash of what a client that drops reasoning sends back for `message`."""
    return _digest(message, None)


def _digest(message: Message, reasoning: str | None) -> bytes:
    content = message.content or ""
    if isinstance(content, str):
        text = f"{message.role}{len(content)}:{content}"
    else:
        text = f"{message.role}[{len(content)}:" + "".join(_part(part) for part in content)
    call_id = message.tool_call_id
    rest = "--" if reasoning is None and call_id is None else f"{_field(reasoning)}{_field(call_id)}"
    for call in message.tool_calls:
        rest += f"{_field(call.id)}{_field(call.name)}{_field(call.arguments)}"
    return _sha256((text + rest).encode()).digest()


def _part(part: Part) -> str:
    return f"t{_field(part.text)}" if isinstance(part, TextPart) else f"i{_field(part.url)}"


def _field(text: str | None) -> str:
    """Length-prefixed, so that no two field lists make one text."""
    return "-" if text is None else f"{len(text)}:{text}"
