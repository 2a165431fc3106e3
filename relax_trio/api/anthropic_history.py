"""The history of a Messages request: system text and messages of blocks → canonical messages.

Tool results are messages of their own in canonical form, so one user message with blocks becomes as many messages as it
takes, in the order of its blocks. Blocks that nothing here serves are left out and remembered. Not covered: fields of
the request besides `system` and `messages` (anthropic.py), what a template makes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import define, field

from relax_trio.api.anthropic_arguments import call_from_client
from relax_trio.api.fields import kind_of
from relax_trio.api.sealed import unseal
from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.messages import Content, ImagePart, Message, Part, TextPart, ToolCall
from relax_trio.data.normalize import (
    assistant_message,
    clean_text,
    merge_leading_system,
    nonempty_text,
    text_or_none,
)
from relax_trio.errors import InvalidRequest

KIND_CHARS: Final = 64
"""A skipped block is told of by its type, which is the client's text."""

KINDS_TOLD: Final = 20
"""How many kinds an error names."""

_BILLING: Final = "x-anthropic-billing-header:"
_ROLES: Final = ("user", "assistant", "system")
_PLACES: Final = {
    "text": ("user message", "assistant message", "system text", "tool result"),
    "image": ("user message", "tool result"),
    "tool_result": ("user message",),
    "thinking": ("assistant message",),
    "redacted_thinking": ("assistant message",),
    "tool_use": ("assistant message",),
}
"""Where each type of block may stand."""


@define
class HistoryReader:
    """Reads one request; `messages` and `skipped` grow as it goes.

    Attributes:
      messages: canonical messages so far.
      skipped: kinds of blocks that were left out, in order of appearance.
    """

    messages: list[Message] = field(factory=list)
    skipped: dict[str, None] = field(factory=dict)
    _ids: dict[str, str] = field(factory=dict)
    """Ids of calls as the client has them → as they are in canonical form."""

    def read(self, system: JsonValue, messages: JsonValue) -> tuple[Message, ...]:
        """The canonical messages of a request.

        Raises:
          InvalidRequest: with `param` naming the client's own field.
        """
        self._system(system, "system")
        if not isinstance(messages, list):
            raise InvalidRequest(f"messages must be a list of messages, not {kind_of(messages)}", param="messages")
        n_before = len(self.messages)
        for index, message in enumerate(messages):
            self._message(message, f"messages[{index}]")
        if len(self.messages) == n_before:
            left_out = f" (left out: {', '.join([*self.skipped][:KINDS_TOLD])})" if self.skipped else ""
            raise InvalidRequest(f"messages must hold at least one message{left_out}", param="messages")
        return merge_leading_system(self.messages)

    def skip(self, kind: str) -> None:
        """Remember that something of this kind was left out."""
        self.skipped[clean_text(kind[:KIND_CHARS])] = None

    # --- messages -------------------------------------------------------------------------------------------

    def _message(self, raw: JsonValue, path: str) -> None:
        if not isinstance(raw, dict):
            raise InvalidRequest(f"{path} must be an object, not {kind_of(raw)}", param=path)
        role, content = raw.get("role"), raw.get("content")
        if role not in _ROLES:
            said = repr(role[:KIND_CHARS]) if isinstance(role, str) else kind_of(role)
            raise InvalidRequest(f"{path}.role must be user, assistant or system, not {said}", param=f"{path}.role")
        path = f"{path}.content"
        if content is None:
            raise InvalidRequest(f"{path} must be a string or a list of blocks, not null or absent", param=path)
        if role == "assistant":
            self._assistant(content, path)
        elif role == "user":
            self._user(content, path)
        elif not self._system(content, path):
            raise InvalidRequest(f"{path} must not be empty for role system", param=path)

    def _system(self, raw: JsonValue, path: str) -> bool:
        """Read system text; False where nothing was said. The volatile billing line of one client is no text."""
        if raw is None:
            return False
        texts = [_text(block, at) for block, at, _ in self._blocks(raw, path, "system text")]
        if content := "".join(text for text in texts if not _is_billing(text)):
            self.messages.append(Message(role="system", content=content))
        return any(texts) or _has_more(raw, texts)

    def _user(self, raw: JsonValue, path: str) -> None:
        n_before, parts = len(self.messages), list[Part]()

        def end_message() -> None:
            if content := _content(parts):
                self.messages.append(Message(role="user", content=content))
            parts.clear()

        blocks = self._blocks(raw, path, "user message")
        for block, at, kind in blocks:
            if kind == "tool_result":
                end_message()
                self._tool_result(block, at)
            else:
                parts.append(self._part(block, at, kind))
        end_message()
        if len(self.messages) == n_before and not _has_more(raw, blocks):
            raise InvalidRequest(f"{path} must hold text, images or tool results", param=path)

    def _tool_result(self, block: JsonObject, path: str) -> None:
        call_id = nonempty_text(block.get("tool_use_id"), f"{path}.tool_use_id")
        given, path = block.get("content"), f"{path}.content"
        blocks = [] if given is None else self._blocks(given, path, "tool result")
        content = _content([self._part(part, at, kind) for part, at, kind in blocks])
        self.messages.append(Message(role="tool", content=content, tool_call_id=self._ids.get(call_id, call_id)))

    def _assistant(self, raw: JsonValue, path: str) -> None:
        texts: list[str] = []
        reasonings: list[str] = []
        calls: list[ToolCall] = []
        for block, at, kind in self._blocks(raw, path, "assistant message"):
            if kind == "text":
                texts.append(_text(block, at))
            elif kind == "tool_use":
                calls.append(self._call(block, at))
            elif (reasoning := _reasoning(block, at)) is not None:
                reasonings.append(reasoning)
            else:
                self.skip(kind)
        self.messages.append(assistant_message("".join(texts), "\n\n".join(reasonings), tuple(calls), param=path))

    def _call(self, block: JsonObject, path: str) -> ToolCall:
        call_id = nonempty_text(block.get("id"), f"{path}.id")
        name = nonempty_text(block.get("name"), f"{path}.name")
        try:
            call = call_from_client(call_id, name, block.get("input"))
        except (ValueError, RecursionError) as exc:
            raise InvalidRequest(f"{path}.input: {exc}", param=f"{path}.input") from exc
        self._ids[call_id] = call.id
        return call

    # --- blocks ---------------------------------------------------------------------------------------------

    def _blocks(self, raw: JsonValue, path: str, place: str) -> list[tuple[JsonObject, str, str]]:
        """The blocks of a content that mean something at `place`, each with its path and type."""
        if isinstance(raw, str):
            return [({"text": raw}, path, "text")]
        if not isinstance(raw, list):
            raise InvalidRequest(f"{path} must be a string or a list of blocks, not {kind_of(raw)}", param=path)
        found: list[tuple[JsonObject, str, str]] = []
        for index, item in enumerate(raw):
            at = f"{path}[{index}]"
            block: JsonValue = {"text": item} if isinstance(item, str) else item
            if not isinstance(block, dict):
                raise InvalidRequest(f"{at} must be an object, not {kind_of(block)}", param=at)
            kind = block.get("type", "text" if "text" in block else None)
            if not isinstance(kind, str):
                raise InvalidRequest(f"{at}.type must be a string, not {kind_of(kind)}", param=f"{at}.type")
            if kind not in _PLACES:
                self.skip(kind)
            elif place not in _PLACES[kind]:
                raise InvalidRequest(f"{at} is a {kind} block, which cannot stand in a {place}", param=at)
            else:
                found.append((block, at, kind))
        return found

    def _part(self, block: JsonObject, path: str, kind: str) -> Part:
        if kind == "text":
            return TextPart(_text(block, path))
        return ImagePart(_image_url(block.get("source"), f"{path}.source"))


def _has_more(raw: JsonValue, kept: Sequence[object]) -> bool:
    """Whether a content holds blocks that were left out: a message of nothing else is left out, not refused."""
    return isinstance(raw, list) and len(kept) < len(raw)


def _content(parts: Sequence[Part]) -> Content:
    """Parts as they are, or one string where all of them are text."""
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    return "".join(texts) if len(texts) == len(parts) else tuple(parts)


def _text(block: JsonObject, path: str) -> str:
    text = block.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.text must be a string, not {kind_of(text)}", param=f"{path}.text")
    return clean_text(text)


def _is_billing(text: str) -> bool:
    """Whether a system text is only the line that one client writes anew for every request."""
    line = text.strip()
    return line.startswith(_BILLING) and "\n" not in line


def _image_url(source: JsonValue, path: str) -> str:
    """The URL of an image, a data: URL for one that is sent along."""
    if not isinstance(source, dict):
        raise InvalidRequest(f"{path} must be an object, not {kind_of(source)}", param=path)
    if source.get("type") == "url":
        url = nonempty_text(source.get("url"), f"{path}.url")
        if not url.startswith(("http:", "https:", "data:")):
            raise InvalidRequest(f"{path}.url must be an http:, https: or data: URL", param=f"{path}.url")
        return url
    if source.get("type") == "base64":
        media_type = nonempty_text(source.get("media_type"), f"{path}.media_type")
        return f"data:{media_type};base64,{nonempty_text(source.get('data'), f'{path}.data')}"
    raise InvalidRequest(f"{path}.type must be url or base64", param=f"{path}.type")


def _reasoning(block: JsonObject, path: str) -> str | None:
    """What a thinking block's signature carries, which no client touches, else its text; None where neither is."""
    if block.get("type") == "redacted_thinking":
        return unseal(text_or_none(block.get("data"), f"{path}.data") or "")
    text = text_or_none(block.get("thinking"), f"{path}.thinking")
    signature = text_or_none(block.get("signature"), f"{path}.signature")
    return unseal(signature or "") or text or None
