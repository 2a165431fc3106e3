"""What a template puts after an assistant turn: the token that ends it and the text before the next turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from attrs import frozen

from relax_trio.data.json import JsonObject, canonical_json
from relax_trio.data.messages import Message, ToolCall
from relax_trio.errors import ConfigError, InvalidRequest
from relax_trio.tokens.template import ChatTemplate

SENTINEL: Final = "qzRelaxTurnSentinel7Kqz"
"""Stands for a generated turn; plain letters, so that no template trims, splits or escapes it."""

_NEXT: Final = "qzRelaxNextMessage7Kqz"
_OPENING: Final = Message(role="user", content="x")


@frozen
class TurnEnd:
    """Text at which a recorded turn ends: `text` is the end-of-turn token, `separator` what follows it."""

    text: str
    separator: str


def sentinel_base(calls: Sequence[ToolCall] | None) -> tuple[Message, Message]:
    """A two-message conversation whose assistant turn holds `SENTINEL`, with `calls` (ids and names) where given.

    Among calls the sentinel is the last one's argument, because many templates drop content beside calls.
    """
    if not calls:
        return _OPENING, Message(role="assistant", content=SENTINEL)
    marked = [ToolCall(id=call.id, name=call.name, arguments="{}") for call in calls[:-1]]
    last = ToolCall(id=calls[-1].id, name=calls[-1].name, arguments=canonical_json({"x": SENTINEL}))
    return _OPENING, Message(role="assistant", tool_calls=(*marked, last))


def after_sentinel(text: str) -> str | None:
    """Text behind the sentinel, None where the template did not print it."""
    _, found, tail = text.partition(SENTINEL)
    return tail if found else None


def first_end(tail: str, ends: Iterable[str]) -> tuple[int, str] | None:
    """Position and text of the earliest of `ends` in `tail`; the longest where several begin there."""
    found = [(at, -len(end), end) for end in ends if (at := tail.find(end)) >= 0]
    if not found:
        return None
    at, _, end = min(found)
    return at, end


def find_turn_ends(template: ChatTemplate, stops: Sequence[str], specials: Sequence[str]) -> tuple[TurnEnd, ...]:
    """The ends the template gives to a plain turn before a user message and to tool calls before a result.

    Args:
      stops: texts of the tokens that the checkpoint says end generation.
      specials: texts of all special tokens, looked at where no stop token is found.

    Raises:
      ConfigError: the template prints no assistant text, or no token behind it.
    """
    try:
        plain = _probe(template, None, Message(role="user", content=_NEXT), (), stops, specials)
    except InvalidRequest as exc:
        raise ConfigError(f"a plain conversation cannot be rendered: {exc}") from exc
    if plain is None:
        raise ConfigError(
            "the chat template ends an assistant turn with no special token, so a turn's end cannot be told from its "
            "text; use a template whose assistant turns end with one (such as <|im_end|>)"
        )
    call = ToolCall(id="call00000", name="f", arguments="{}")
    result = Message(role="tool", content=_NEXT, tool_call_id=call.id)
    tool: JsonObject = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    try:
        calls = _probe(template, (call,), result, (tool,), stops, specials)
    except (ConfigError, InvalidRequest):
        calls = None  # a template without tools
    return (plain,) if calls is None or calls == plain else (plain, calls)


def _probe(
    template: ChatTemplate,
    calls: Sequence[ToolCall] | None,
    new: Message,
    tools: Sequence[JsonObject],
    stops: Sequence[str],
    specials: Sequence[str],
) -> TurnEnd | None:
    text = template.render((*sentinel_base(calls), new), tools, {}, add_generation_prompt=True)
    tail = after_sentinel(text)
    if tail is None:
        raise ConfigError("the chat template does not print the assistant's text, so nothing can be trained with it")
    between = tail.partition(_NEXT)[0]
    found = first_end(between, stops) or first_end(between, specials)
    if found is None:
        return None
    at, end = found
    rest = between[at + len(end) :]
    following = first_end(rest, specials)
    return TurnEnd(text=end, separator=rest if following is None else rest[: following[0]])
