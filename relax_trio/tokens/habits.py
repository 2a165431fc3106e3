"""Which shapes of message a chat template takes, found by rendering a few short dialogues once.

Templates agree on role and content and on little else: some want tool-call arguments as mappings, some as JSON text;
some read reasoning from `thinking`; some take call ids of nine letters only; some lose a system message that doesn't
come first. What a template prints decides, never its name. Placing system messages is `placement.py`.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from attrs import evolve, frozen

from relax_trio.data.json import JsonObject, JsonValue, parse_json
from relax_trio.data.messages import Message, ToolCall
from relax_trio.errors import InvalidRequest

Render: TypeAlias = Callable[[Sequence[JsonObject], bool], str]
"""Text of Chat-shaped messages, with or without the generation prompt; raises `InvalidRequest`."""

_KEY, _VALUE, _NAME = "relaxkey", "relaxvalue", "relaxprobe"
_ARGUMENTS: Final = f'{{"{_KEY}":"{_VALUE}"}}'
_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
_SHORT_ID: Final = "callprobe"
_LONG_ID: Final = "call_0123456789abcdef01234567"
_ALPHABET: Final = string.digits + string.ascii_letters
_SHORT_LEN: Final = 9


@frozen(kw_only=True)
class Habits:
    """How canonical messages are given to one template.

    Attributes:
      no_content: absent content beside tool calls, "" or None.
      arguments_as_text: tool-call arguments are given as JSON text; else as mappings where they are objects.
      wraps_scalars: arguments that are no object are given as `{"value": …}`, because the template takes objects only.
      reasoning_key: key under which the template reads reasoning.
      prints_reasoning: the template prints reasoning at least while its turn is the last.
      short_ids: call ids are given as nine letters or digits.
      first_system: a leading system message is printed.
      later_system: a later system message is printed where it stands.
      refuses_system: a leading system message was refused; a conversation that has one is tried as it is all the same.
    """

    no_content: str | None = ""
    arguments_as_text: bool = False
    wraps_scalars: bool = False
    reasoning_key: str = _REASONING_KEYS[0]
    prints_reasoning: bool = False
    short_ids: bool = False
    first_system: bool = True
    later_system: bool = True
    refuses_system: bool = False

    def to_chat(self, message: Message) -> JsonObject:
        """The Chat shape of a message, as the template takes it."""
        chat = message.to_chat(arguments_as_objects=not self.arguments_as_text)
        if message.role == "assistant":
            if message.content is None:
                chat["content"] = self.no_content if message.tool_calls else ""
            if message.reasoning_content is not None:
                chat[self.reasoning_key] = chat.pop("reasoning_content")
            if message.tool_calls:
                chat["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            chat["tool_call_id"] = self._id(message.tool_call_id)
        return chat

    def _call(self, call: ToolCall) -> JsonObject:
        arguments: JsonValue = call.arguments
        if not self.arguments_as_text:
            parsed = call.arguments_object()
            if parsed is not None:
                arguments = parsed
            elif self.wraps_scalars:
                arguments = {"value": _json_or_text(call.arguments)}
        function: JsonObject = {"name": call.name, "arguments": arguments}
        return {"id": self._id(call.id), "type": "function", "function": function}

    def _id(self, call_id: str) -> str:
        return short_id(call_id) if self.short_ids else call_id


def short_id(call_id: str) -> str:
    """Nine letters or digits that stand for a call id, always the same; an id of that form stays as it is."""
    if len(call_id) == _SHORT_LEN and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest()[:8], "big")
    letters = []
    for _ in range(_SHORT_LEN):
        number, digit = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[digit])
    return "".join(letters)


def argument_forms(render: Render) -> tuple[str, str]:
    """How the template prints tool-call arguments given as a mapping, and given as JSON text, in words."""
    mapping, text = (_try(render, _calling(Habits(arguments_as_text=as_text), _ARGUMENTS)) for as_text in (False, True))
    return _form(mapping), _form(text)


def _form(text: str | None) -> str:
    if text is None:
        return "refused"
    if _VALUE not in text:
        return "not printed"
    if f"'{_KEY}'" in text:
        return "as Python writes mappings"
    if f'\\"{_KEY}\\"' in text:
        return "as a JSON string"
    return "as JSON" if f'"{_KEY}"' in text else "in markup"


def find_habits(render: Render) -> Habits:
    """Play the shapes in which templates differ. What a template refuses in every shape keeps the default."""
    habits = _call_shape(render)
    habits = evolve(habits, short_ids=_wants_short_ids(render, habits))
    habits = evolve(habits, wraps_scalars=_refuses_scalars(render, habits))
    habits = _reasoning_shape(render, habits)
    first = _try(render, [{"role": "system", "content": _VALUE}, _user("x")])
    later = _try(render, [_user("x"), _answer(_NAME), {"role": "system", "content": _VALUE}, _user("y")])
    return evolve(
        habits,
        first_system=first is None or _VALUE in first,
        later_system=later is None or _VALUE in later.partition(_NAME)[2],
        refuses_system=first is None,
    )


def _call_shape(render: Render) -> Habits:
    """How calls are given so that they are printed, with their arguments as JSON: the shortest text, "" before None."""
    found: list[tuple[int, Habits]] = []
    for as_text in (False, True):
        for no_content in ("", None):
            habits = Habits(arguments_as_text=as_text, no_content=no_content)
            text = _try(render, _calling(habits, _ARGUMENTS))
            if text is not None and _NAME in text and _VALUE in text and f"'{_KEY}'" not in text:
                found.append((len(text), habits))
        if found:
            break
    return min(found, key=lambda pair: pair[0])[1] if found else Habits()


def _wants_short_ids(render: Render, habits: Habits) -> bool:
    long, short = (_try(render, _calling(habits, "{}", call_id)) for call_id in (_LONG_ID, _SHORT_ID))
    return long is None and short is not None


def _refuses_scalars(render: Render, habits: Habits) -> bool:
    if habits.arguments_as_text:
        return False
    text, objects = (_try(render, _calling(habits, args)) for args in (f'["{_VALUE}"]', _ARGUMENTS))
    return objects is not None and (text is None or _VALUE not in text)


def _reasoning_shape(render: Render, habits: Habits) -> Habits:
    for key in _REASONING_KEYS:
        plain: JsonObject = {**_answer("y"), key: _VALUE}
        user, call, result = _calling(habits, "{}")
        texts = (_try(render, [user, plain], prompt=False), _try(render, [user, {**call, key: _VALUE}, result]))
        if any(text is not None and _VALUE in text for text in texts):
            return evolve(habits, reasoning_key=key, prints_reasoning=True)
    return habits


def _calling(habits: Habits, arguments: str, call_id: str = _SHORT_ID) -> list[JsonObject]:
    call = Message(role="assistant", tool_calls=(ToolCall(id=call_id, name=_NAME, arguments=arguments),))
    return [_user("x"), habits.to_chat(call), {"role": "tool", "content": "y", "tool_call_id": call_id}]


def _user(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def _answer(text: str) -> JsonObject:
    return {"role": "assistant", "content": text}


def _try(render: Render, chat: Sequence[JsonObject], *, prompt: bool = True) -> str | None:
    try:
        return render(chat, prompt)
    except InvalidRequest:
        return None


def _json_or_text(text: str) -> JsonValue:
    try:
        return parse_json(text)
    except ValueError:
        return text
