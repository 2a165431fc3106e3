"""Input items of the Responses API → canonical messages.

One turn of the assistant is several items here and one message there: reasoning, text and calls in a row are one
message. It ends with the next item of another kind; before any call also with reasoning or text that would come second,
as two turns in a row do. After a call nothing but another's item ends it, because results have to follow the calls.
"""

from __future__ import annotations

from typing import Final

from attrs import define, field

from relax_trio.api.fields import kind_of
from relax_trio.api.responses_reasoning import item_reasoning
from relax_trio.api.responses_tools import MAX_KIND_CHARS, Tools
from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.messages import Content, ImagePart, Message, Part, Role, TextPart, ToolCall
from relax_trio.data.normalize import (
    assistant_message,
    canonical_arguments,
    clean_text,
    merge_leading_system,
    nonempty_text,
    text_or_none,
)
from relax_trio.errors import InvalidRequest, UnsupportedFeature

_ROLES: Final[dict[str, Role]] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}
_TEXT_KINDS: Final = frozenset({"input_text", "output_text", "text"})
_IMAGE_ROLES: Final = frozenset({"user", "tool"})


@define
class _Turn:
    """The assistant message that is being put together."""

    reasoning: list[str] = field(factory=list)
    texts: list[str] = field(factory=list)
    calls: list[ToolCall] = field(factory=list)
    is_said: bool = False
    path: str = "input"


@define
class InputReader:
    """Reads the input of one request.

    Attributes:
      tools: names of the request's functions.
      messages: what was read so far, in order.
      skipped: kinds of items that were left out, e.g. "web_search_call".
    """

    tools: Tools
    messages: list[Message] = field(factory=list)
    skipped: list[str] = field(factory=list)
    _turn: _Turn = field(factory=_Turn)

    def read(self, raw: JsonValue, instructions: str | None) -> tuple[Message, ...]:
        """The canonical messages of `instructions` and `input`.

        Raises:
          InvalidRequest: with `param` set to the path of the offending field, e.g. `input[3].content[0].text`.
          UnsupportedFeature: an item that is not kept here is referred to.
        """
        if instructions:
            self.messages.append(Message(role="system", content=instructions))
        n_instructions = len(self.messages)
        if isinstance(raw, str):
            self._other(Message(role="user", content=_said(clean_text(raw), "user", "input")))
        elif isinstance(raw, list):
            for index, item in enumerate(raw):
                self._item(item, f"input[{index}]")
            self._end_turn()
        else:
            raise InvalidRequest(f"input must be a string or a list of items, not {kind_of(raw)}", param="input")
        if len(self.messages) == n_instructions:
            left_out = f" (left out: {', '.join(dict.fromkeys(self.skipped))})" if self.skipped else ""
            raise InvalidRequest(f"input must hold at least one message or tool result{left_out}", param="input")
        return merge_leading_system(self.messages)

    def _item(self, raw: JsonValue, path: str) -> None:
        if not isinstance(raw, dict):
            raise InvalidRequest(f"{path} must be an object, not {kind_of(raw)}", param=path)
        kind = _item_kind(raw, path)
        if kind == "message":
            self._message(raw, path)
        elif kind == "reasoning":
            self._reasoning(raw, path)
        elif kind == "function_call":
            self._function_call(raw, path)
        elif kind == "function_call_output":
            call_id = nonempty_text(raw.get("call_id"), f"{path}.call_id")
            output = self._content(raw.get("output"), "tool", f"{path}.output")
            self._other(Message(role="tool", content=output or "", tool_call_id=call_id))
        elif kind == "item_reference":
            _refuse_reference(raw, path)
        else:
            self.skipped.append(kind[:MAX_KIND_CHARS])

    def _message(self, raw: JsonObject, path: str) -> None:
        name = raw.get("role")
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            said = repr(name) if isinstance(name, str) else kind_of(name)
            raise InvalidRequest(
                f"{path}.role must be one of user, assistant, system, developer, not {said}", param=f"{path}.role"
            )
        content = self._content(raw.get("content"), role, f"{path}.content")
        if role == "assistant":
            self._assistant_text(content, path)
        else:
            self._other(Message(role=role, content=_said(content, role, f"{path}.content")))

    # --- the assistant's turn ---------------------------------------------------------------------------------

    def _reasoning(self, raw: JsonObject, path: str) -> None:
        text = item_reasoning(raw, path)
        if self._turn.is_said and not self._turn.calls:
            self._end_turn()
        self._turn.path = path
        if text is not None:
            self._turn.reasoning.append(text)

    def _assistant_text(self, content: Content, path: str) -> None:
        if self._turn.is_said and not self._turn.calls:
            self._end_turn()
        self._turn.is_said, self._turn.path = True, f"{path}.content"
        if isinstance(content, str):
            self._turn.texts.append(content)

    def _function_call(self, raw: JsonObject, path: str) -> None:
        namespace = text_or_none(raw.get("namespace"), f"{path}.namespace")
        given = raw.get("arguments")
        try:
            arguments = canonical_arguments({} if given is None else given)
        except ValueError as exc:
            raise InvalidRequest(f"{path}.arguments: {exc}", param=f"{path}.arguments") from exc
        call = ToolCall(
            id=nonempty_text(raw.get("call_id"), f"{path}.call_id"),
            name=self.tools.canonical_name(nonempty_text(raw.get("name"), f"{path}.name"), namespace),
            arguments=arguments,
        )
        self._turn.calls.append(call)

    def _end_turn(self) -> None:
        """Add the assistant message that the items since the last one make; none where they said nothing."""
        turn, self._turn = self._turn, _Turn()
        if not (turn.is_said or turn.calls or turn.reasoning):
            return
        content = "\n\n".join(turn.texts) if turn.texts else None
        reasoning = "\n\n".join(turn.reasoning) or None
        self.messages.append(assistant_message(content, reasoning, tuple(turn.calls), param=turn.path))

    def _other(self, message: Message) -> None:
        self._end_turn()
        self.messages.append(message)

    # --- content ----------------------------------------------------------------------------------------------

    def _content(self, raw: JsonValue, role: Role, path: str) -> Content:
        if raw is None:
            return None
        if isinstance(raw, str):
            return clean_text(raw)
        if not isinstance(raw, list):
            raise InvalidRequest(f"{path} must be a string or a list of parts, not {kind_of(raw)}", param=path)
        parts = [self._part(part, role, f"{path}[{index}]") for index, part in enumerate(raw)]
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        return "".join(texts) if len(texts) == len(parts) else tuple(parts)

    def _part(self, raw: JsonValue, role: Role, path: str) -> Part:
        if isinstance(raw, str):
            return TextPart(clean_text(raw))
        if not isinstance(raw, dict):
            raise InvalidRequest(f"{path} must be an object, not {kind_of(raw)}", param=path)
        kind = raw.get("type")
        if isinstance(kind, str) and (kind in _TEXT_KINDS or kind == "refusal"):
            key = "refusal" if kind == "refusal" else "text"
            text = raw.get(key)
            if not isinstance(text, str):
                raise InvalidRequest(f"{path}.{key} must be a string, not {kind_of(text)}", param=f"{path}.{key}")
            return TextPart(clean_text(text))
        if kind != "input_image":
            raise InvalidRequest(
                f"{path}.type must be input_text, output_text, refusal or input_image, not {kind!r}",
                param=f"{path}.type",
            )
        if role not in _IMAGE_ROLES:
            raise InvalidRequest(f"{path}: a {role} message cannot hold images", param=path)
        url = raw.get("image_url")
        if not isinstance(url, str) or not url.startswith(("data:", "http:", "https:")):
            raise InvalidRequest(
                f"{path}.image_url must be a data:, http: or https: URL (uploaded files aren't kept here)",
                param=f"{path}.image_url",
            )
        return ImagePart(clean_text(url))


def _item_kind(raw: JsonObject, path: str) -> str:
    """The item's type. Messages and references are also sent without one."""
    kind = raw.get("type")
    if kind is not None:
        return nonempty_text(kind, f"{path}.type")
    if "role" in raw:
        return "message"
    if isinstance(raw.get("id"), str):
        return "item_reference"
    raise InvalidRequest(f"{path} must have a type, or a role where it is a message", param=f"{path}.type")


def _refuse_reference(raw: JsonObject, path: str) -> None:
    """Refuse what stands for an item that isn't kept; reasoning by its id alone counts as not sent, as everywhere.

    Raises:
      UnsupportedFeature: it stands for anything else: without it the model would not see what it said.
    """
    item_id = text_or_none(raw.get("id"), f"{path}.id") or ""
    if not item_id.startswith("rs_"):
        raise UnsupportedFeature(
            f"{path} refers to the item {item_id[:MAX_KIND_CHARS]!r}, but no item is kept here; send the items "
            "themselves (in most SDKs by `store: false`)",
            param=path,
        )


def _said(content: Content, role: Role, path: str) -> Content:
    if not content:
        raise InvalidRequest(f"{path} must not be empty for role {role}", param=path)
    return content
