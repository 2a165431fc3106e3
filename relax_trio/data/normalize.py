"""Chat-shaped JSON → canonical messages, tools and template arguments.

Every way in ends here: requests of all model APIs once their dialect is taken off, dataset prompts, explicit export
records. What one place accepts, all accept, so that a state written down once is found again. Identity (hashing) is
`forest/`; what a template does with the result is `tokens/`.

Two texts that mean the same become the same value: `developer` is `system`, text-only part lists are one string,
leading system messages are one, tool-call arguments are compact JSON with sorted keys, an assistant without text but
with calls or reasoning has content None, an absent tool result is "".

Parts and tools that nothing here serves are left out where the caller asks to be told of them (`skipped`), and refused
elsewhere: an agent's own history is not ours to correct, a dataset is its owner's.
"""

from __future__ import annotations

import re
from typing import Final

from relax_trio.data.json import JsonObject, JsonValue, canonical_json, parse_json
from relax_trio.data.messages import Content, ImagePart, Message, Part, Role, TextPart, ToolCall
from relax_trio.errors import InvalidRequest

_ROLES: Final[dict[str, Role]] = {
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "system": "system",
    "developer": "system",
}
_IMAGE_ROLES: Final = frozenset({"user", "tool"})
_TEXT_KEYS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of text parts, each with the key of its text; clients mix the names of OpenAI's two APIs."""

_FUNCTION_KEYS: Final = frozenset({"name", "description", "parameters", "strict"})
_KIND_CHARS: Final = 64
"""What was left out is told by its type, which is the client's text."""

_RESERVED_KWARGS: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def normalize_messages(
    raw: JsonValue,
    *,
    param: str = "messages",
    skipped: list[str] | None = None,
    before: tuple[Message, ...] = (),
    n_before: int = 0,
) -> tuple[Message, ...]:
    """Make canonical messages of a Chat-shaped list.

    Args:
      raw: a nonempty list of message objects; unknown keys are dropped.
      param: path that errors name, e.g. "messages" → `messages[3].content`.
      skipped: gets the types of content parts that are left out; None: they are refused. A message of the user or the
        system that holds nothing else is left out with them.
      before: canonical messages of the beginning of the list, which `raw` goes on from.
      n_before: how many items of the list they were read from.

    Raises:
      InvalidRequest: with `param` set to the path of the offending field.
    """
    if not isinstance(raw, list):
        raise InvalidRequest(f"{param} must be a list of messages, not {_kind(raw)}", param=param)
    if not raw and not before:
        raise InvalidRequest(f"{param} must hold at least one message", param=param)
    read = [_message(item, f"{param}[{index}]", skipped) for index, item in enumerate(raw, n_before)]
    messages = [*before, *(message for message in read if message is not None)]
    if not messages:
        left_out = ", ".join(dict.fromkeys(skipped or ()))
        raise InvalidRequest(f"{param} must hold at least one message (left out: {left_out})", param=param)
    return merge_leading_system(messages)


def normalize_tools(
    raw: JsonValue, *, param: str = "tools", skipped: list[str] | None = None
) -> tuple[JsonObject, ...]:
    """Make nested function tools `{"type": "function", "function": {name, description, parameters, strict}}`.

    The client's key order is kept, because templates print it; identity does not depend on it. Absent fields stay
    absent, null ones become absent, `cache_control` and unknown keys are dropped.

    Args:
      skipped: gets "tool " and the type of each tool that is no function, which is left out; None: it is refused.

    Raises:
      InvalidRequest: with `param` set to the path of the offending field, e.g. `tools[0].function.name`.
    """
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise InvalidRequest(f"{param} must be a list of function tools, not {_kind(raw)}", param=param)
    tools = [_tool(item, f"{param}[{index}]", skipped) for index, item in enumerate(raw)]
    return tuple(tool for tool in tools if tool is not None)


def normalize_template_kwargs(raw: JsonValue, *, param: str = "chat_template_kwargs") -> JsonObject:
    """Check template arguments; null means none.

    Raises:
      InvalidRequest: no object, or a key that is not the client's to set (`add_generation_prompt`, `tokenize`,
        `tools` and the renderer's other own arguments).
    """
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{param} must be an object, not {_kind(raw)}", param=param)
    for key in raw:
        if key in _RESERVED_KWARGS:
            raise InvalidRequest(
                f"{param}.{key} is set by the server; leave it out (tools go into the request's own `tools`)",
                param=f"{param}.{key}",
            )
    return _checked_object(raw, param)


def canonical_arguments(raw: JsonValue) -> str:
    """Canonical text of tool-call arguments, given as JSON text or as a value.

    An object becomes compact JSON with sorted keys and integral floats as ints; text that is no JSON object stays as it
    is; a bare scalar or list becomes its JSON text.

    Raises:
      ValueError: a value (never a text) that has no JSON form, such as an infinity.
    """
    value: JsonValue = raw
    if isinstance(raw, str):
        try:
            value = parse_json(raw)
        except ValueError:
            return clean_text(raw)
        if not isinstance(value, dict):
            return clean_text(raw)
    try:
        return clean_text(canonical_json(value))
    except (ValueError, RecursionError) as exc:  # 1e999 parses as infinity; the parser nests deeper than the writer
        if isinstance(raw, str):
            return clean_text(raw)
        raise ValueError(f"the arguments have no JSON form: {exc}") from exc


def clean_text(text: str) -> str:
    """Replace lone surrogates, which JSON can carry and UTF-8 and tokenizers cannot, by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub("\ufffd", text)
    return text


# --- messages --------------------------------------------------------------------------------------------------


def _message(raw: JsonValue, path: str, skipped: list[str] | None) -> Message | None:
    """The message; None where all that it says is left out."""
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{path} must be an object, not {_kind(raw)}", param=path)
    name = raw.get("role")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        said = repr(name) if isinstance(name, str) else _kind(name)
        raise InvalidRequest(
            f"{path}.role must be one of user, assistant, tool, system, developer, not {said}", param=f"{path}.role"
        )
    n_skipped = len(skipped or ())
    given = raw.get("content")
    content = clean_text(given) if isinstance(given, str) else _content(given, role, f"{path}.content", skipped)
    if role == "assistant":
        return _assistant(raw, content, path)
    if role == "tool":
        call_id = text_or_none(raw.get("tool_call_id"), f"{path}.tool_call_id")
        return Message(role=role, content=content or "", tool_call_id=call_id)
    if not content:
        if len(skipped or ()) > n_skipped:
            return None
        raise InvalidRequest(f"{path}.content must not be empty for role {role}", param=f"{path}.content")
    return Message(role=role, content=content)


def _assistant(raw: JsonObject, content: Content, path: str) -> Message:
    """The assistant's message. Paths are put together only where there is something to name: histories are long."""
    reasoning: str | None = None
    for key in ("reasoning_content", "reasoning"):
        if not reasoning and raw.get(key) is not None:
            reasoning = text_or_none(raw[key], f"{path}.{key}")
    given = raw.get("tool_calls")
    calls = () if given is None else _tool_calls(given, f"{path}.tool_calls")
    if content is None:  # a refusal of another model, replayed: its text is all that message says
        content = text_or_none(raw.get("refusal"), f"{path}.refusal")
    return assistant_message(content, reasoning, calls, param=f"{path}.content")


def assistant_message(
    content: Content, reasoning: str | None, calls: tuple[ToolCall, ...], *, param: str = "content"
) -> Message:
    """Build a canonical assistant message: empty reasoning is none, empty content beside calls or reasoning is None.

    Raises:
      InvalidRequest: content is None and there are neither calls nor reasoning.
    """
    if calls or reasoning:
        content = content or None
    elif content is None:
        raise InvalidRequest(
            f"{param} may be null or absent only when the assistant message has tool calls or reasoning", param=param
        )
    return Message(role="assistant", content=content, reasoning_content=reasoning or None, tool_calls=calls)


def _content(raw: JsonValue, role: Role, path: str, skipped: list[str] | None) -> Content:
    if raw is None:
        return None
    if isinstance(raw, str):
        return clean_text(raw)
    if not isinstance(raw, list):
        raise InvalidRequest(f"{path} must be a string or a list of parts, not {_kind(raw)}", param=path)
    read = [_part(item, role, f"{path}[{index}]", skipped) for index, item in enumerate(raw)]
    parts = [part for part in read if part is not None]
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    return "".join(texts) if len(texts) == len(parts) else tuple(parts)


def _part(raw: JsonValue, role: Role, path: str, skipped: list[str] | None) -> Part | None:
    if isinstance(raw, str):
        return TextPart(clean_text(raw))
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{path} must be an object, not {_kind(raw)}", param=path)
    kind = raw.get("type", "text" if "text" in raw else None)
    if not isinstance(kind, str):
        raise InvalidRequest(f"{path}.type must be a string, not {_kind(kind)}", param=f"{path}.type")
    if kind in _TEXT_KEYS:
        key = _TEXT_KEYS[kind]
        text = raw.get(key)
        if not isinstance(text, str):
            raise InvalidRequest(f"{path}.{key} must be a string, not {_kind(text)}", param=f"{path}.{key}")
        return TextPart(clean_text(text))
    if kind != "image_url":
        if skipped is None:
            raise InvalidRequest(f"{path}.type must be text or image_url, not {kind!r}", param=f"{path}.type")
        skipped.append(clean_text(kind[:_KIND_CHARS]))
        return None
    if role not in _IMAGE_ROLES:
        raise InvalidRequest(f"{path}: a {role} message cannot hold images", param=path)
    return ImagePart(_image_url(raw.get("image_url"), f"{path}.image_url"))


def _image_url(raw: JsonValue, path: str) -> str:
    url = raw.get("url") if isinstance(raw, dict) else raw
    if not isinstance(url, str) or not url.startswith(("data:", "http:", "https:")):
        raise InvalidRequest(f"{path} must be a data:, http: or https: URL, or an object with one in `url`", param=path)
    return clean_text(url)


def _tool_calls(raw: JsonValue, path: str) -> tuple[ToolCall, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise InvalidRequest(f"{path} must be a list, not {_kind(raw)}", param=path)
    return tuple(_tool_call(item, f"{path}[{index}]") for index, item in enumerate(raw))


def _tool_call(raw: JsonValue, path: str) -> ToolCall:
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{path} must be an object, not {_kind(raw)}", param=path)
    kind = raw.get("type")
    if kind not in (None, "function"):
        raise InvalidRequest(f"{path}.type must be function, not {kind!r}", param=f"{path}.type")
    function = raw.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{path}.function must be an object, not {_kind(function)}", param=f"{path}.function")
    given = function.get("arguments")
    try:
        arguments = canonical_arguments({} if given is None else given)
    except ValueError as exc:
        raise InvalidRequest(f"{path}.function.arguments: {exc}", param=f"{path}.function.arguments") from exc
    return ToolCall(
        id=nonempty_text(raw.get("id"), f"{path}.id"),
        name=nonempty_text(function.get("name"), f"{path}.function.name"),
        arguments=arguments,
    )


def merge_leading_system(messages: list[Message]) -> tuple[Message, ...]:
    """`messages` with the system messages at their head as one, a blank line between their texts."""
    n_leading = 0
    while n_leading < len(messages) and messages[n_leading].role == "system":
        n_leading += 1
    if n_leading < 2:
        return tuple(messages)
    merged = "\n\n".join(str(message.content) for message in messages[:n_leading])
    return (Message(role="system", content=merged), *messages[n_leading:])


# --- tools -----------------------------------------------------------------------------------------------------


def function_tool(raw: JsonObject, path: str) -> JsonObject:
    """The nested function tool of a flat one: an object that holds name, description, parameters and strict itself.

    Raises:
      InvalidRequest: with `param` below `path`, e.g. `tools[0].name`.
    """
    return {"type": "function", "function": _function(raw, path)}


def _tool(raw: JsonValue, path: str, skipped: list[str] | None) -> JsonObject | None:
    """The tool; None where it is left out."""
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{path} must be an object, not {_kind(raw)}", param=path)
    kind = raw.get("type")
    if kind is not None and not isinstance(kind, str):
        raise InvalidRequest(f"{path}.type must be a string, not {_kind(kind)}", param=f"{path}.type")
    if kind not in (None, "function"):
        if skipped is None:
            raise InvalidRequest(f"{path}.type must be function, not {kind!r}", param=f"{path}.type")
        skipped.append(f"tool {clean_text(kind[:_KIND_CHARS])}")
        return None
    function = raw.get("function")
    if not isinstance(function, dict):
        hint = '; put name, description and parameters into "function"' if "name" in raw else ""
        raise InvalidRequest(
            f"{path}.function must be an object, not {_kind(function)}{hint}", param=f"{path}.function"
        )
    kept = _function(function, f"{path}.function")
    if kind is None:
        return {"type": "function", "function": kept}
    return {key: kept if key == "function" else "function" for key in raw if key in ("type", "function")}


def _function(raw: JsonObject, path: str) -> JsonObject:
    nonempty_text(raw.get("name"), f"{path}.name")
    text_or_none(raw.get("description"), f"{path}.description")
    parameters = raw.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(
            f"{path}.parameters must be a JSON schema object, not {_kind(parameters)}", param=f"{path}.parameters"
        )
    strict = raw.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{path}.strict must be true or false, not {_kind(strict)}", param=f"{path}.strict")
    kept: JsonObject = {key: value for key, value in raw.items() if key in _FUNCTION_KEYS and value is not None}
    return _checked_object(kept, path)


# --- leaves ----------------------------------------------------------------------------------------------------


def _checked_object(value: JsonObject, path: str) -> JsonObject:
    """`value` as it is, or with clean text; refuses what has no canonical text (infinities, absurd nesting)."""
    try:
        text = canonical_json(value)
    except (ValueError, TypeError, RecursionError) as exc:
        raise InvalidRequest(f"{path} is not plain JSON: {exc}", param=path) from exc
    if clean_text(text) is text:
        return value
    return {clean_text(key): _clean_value(item) for key, item in value.items()}


def _clean_value(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [_clean_value(item) for item in value]
    if isinstance(value, dict):
        return {clean_text(key): _clean_value(item) for key, item in value.items()}
    return value


def nonempty_text(raw: JsonValue, path: str) -> str:
    """`raw` as clean text.

    Raises:
      InvalidRequest: with `param` set to `path`; not a string, or an empty one.
    """
    if not isinstance(raw, str) or not raw:
        raise InvalidRequest(
            f"{path} must be a nonempty string, not {'empty' if raw == '' else _kind(raw)}", param=path
        )
    return clean_text(raw)


def text_or_none(raw: JsonValue, path: str) -> str | None:
    """`raw` as clean text, None where it is null.

    Raises:
      InvalidRequest: with `param` set to `path`; neither.
    """
    if raw is None:
        return None
    if not isinstance(raw, str):
        raise InvalidRequest(f"{path} must be a string, not {_kind(raw)}", param=path)
    return clean_text(raw)


def _kind(value: JsonValue) -> str:
    """How JSON calls the type of `value`."""
    if value is None:
        return "null or absent"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    return {str: "a string", list: "a list", dict: "an object"}[type(value)]
