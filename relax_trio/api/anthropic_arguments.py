"""Tool-call arguments as the `input` of a tool_use block, which must be an object, and back.

A model may write arguments that are no object. They go out as an object with one key, `value`: a JSON value as it is,
any other text as a string. So that this comes back as what it was, and not as an object that really has a `value`, the
id of such a call carries a mark behind it; clients keep ids, because results refer to them.
"""

from __future__ import annotations

from typing import Final

from relax_trio.data.json import JsonObject, JsonValue, canonical_json, parse_json
from relax_trio.data.messages import ToolCall
from relax_trio.data.normalize import canonical_arguments, clean_text

_KEY: Final = "value"
_JSON_MARK: Final = "_valuejson"
_TEXT_MARK: Final = "_valuetext"


def call_to_client(call: ToolCall) -> tuple[str, JsonObject]:
    """The id and the input of the call's tool_use block."""
    found, value = _canonical_value(call.arguments)
    if not found:
        return call.id + _TEXT_MARK, {_KEY: call.arguments}
    if isinstance(value, dict):
        return call.id, value
    return call.id + _JSON_MARK, {_KEY: value}


def call_from_client(call_id: str, name: str, given: JsonValue) -> ToolCall:
    """The call of a tool_use block.

    Raises:
      ValueError: `given` has no JSON form, e.g. an infinity inside.
    """
    if isinstance(given, dict) and given.keys() == {_KEY}:
        value = given[_KEY]
        if isinstance(value, str) and (unmarked := _unmarked(call_id, _TEXT_MARK)):
            return ToolCall(id=unmarked, name=name, arguments=canonical_arguments(value))
        if unmarked := _unmarked(call_id, _JSON_MARK):
            return ToolCall(id=unmarked, name=name, arguments=clean_text(canonical_json(value)))
    return ToolCall(id=call_id, name=name, arguments=canonical_arguments({} if given is None else given))


def _unmarked(call_id: str, mark: str) -> str | None:
    return call_id.removesuffix(mark) if call_id.endswith(mark) else None


def _canonical_value(text: str) -> tuple[bool, JsonValue]:
    """The value of which `text` is the canonical JSON, if it is that of one."""
    try:
        value = parse_json(text)
        return canonical_json(value) == text, value
    except (ValueError, RecursionError):
        return False, None
