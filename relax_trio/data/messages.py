"""Canonical messages: the one shape that every model API is normalized to and every template is rendered from.

Normalization (what is dropped, merged, refused) lives in normalize.py; hashing in forest/.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from attrs import field, frozen

from relax_trio.data.json import JsonObject, JsonValue, parse_json

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


_SHOWN_CHARS = 64
"""A data: URL is megabytes."""


@frozen
class TextPart:
    """Text inside a content list that also holds images."""

    text: str


@frozen
class ImagePart:
    """An image inside a content list; `url` is a data:, http: or https: URL, in a dataset's row a file: URL too."""

    url: str = field(repr=lambda url: repr(url if len(url) <= _SHOWN_CHARS else f"{url[:_SHOWN_CHARS]}…"))


Part: TypeAlias = TextPart | ImagePart
Content: TypeAlias = "str | tuple[Part, ...] | None"
"""A string; parts, when an image is among them; None only for an assistant with tool calls or reasoning."""


@frozen(kw_only=True)
class ToolCall:
    """One function call of an assistant message.

    Attributes:
      id: call id as the client knows it.
      name: function name as the model wrote it, known or not.
      arguments: canonical compact JSON of an object; any other text stays as it was written.
    """

    id: str
    name: str
    arguments: str

    def arguments_object(self) -> JsonObject | None:
        """The arguments as an object, or None where the text is no JSON object."""
        try:
            value = parse_json(self.arguments)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


@frozen(kw_only=True)
class Message:
    """One canonical message.

    Attributes:
      role: who speaks.
      content: see `Content`; a tool result may be "".
      reasoning_content: the assistant's reasoning, None where there is none.
      tool_calls: the assistant's calls in order.
      tool_call_id: the call that a tool message answers.
    """

    role: Role
    content: Content = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of its content, in order; those of an image's place between them are apart."""
        if isinstance(self.content, tuple):
            return tuple(part.text for part in self.content if isinstance(part, TextPart))
        return () if self.content is None else (self.content,)

    def to_chat(self, *, arguments_as_objects: bool = False) -> JsonObject:
        """The Chat-Completions shape, as templates, dumps and explicit records use it; absent fields are left out.

        Args:
          arguments_as_objects: give tool-call arguments as mappings where they are JSON objects (what chat templates
            expect) instead of JSON text (what the API says).
        """
        out: JsonObject = {"role": self.role}
        if self.content is not None or not (self.tool_calls or self.reasoning_content is not None):
            out["content"] = _content_json(self.content)
        if self.reasoning_content is not None:
            out["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            out["tool_calls"] = [_call_json(call, arguments_as_objects) for call in self.tool_calls]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        return out


def _content_json(content: Content) -> JsonValue:
    if content is None or isinstance(content, str):
        return content if content is not None else ""
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": "image_url", "image_url": {"url": part.url}}
        for part in content
    ]


def _call_json(call: ToolCall, as_object: bool) -> JsonObject:
    arguments: JsonValue = call.arguments
    if as_object:
        parsed = call.arguments_object()
        arguments = call.arguments if parsed is None else parsed
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
