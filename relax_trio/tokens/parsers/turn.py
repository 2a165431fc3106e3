"""What a turn's text says: reasoning, content and calls, by the one rule that holds for every parser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from attrs import frozen

from relax_trio.data.json import JsonObject
from relax_trio.tokens.parsers.base import ParsedCall, ReasoningParser, ToolCallParser, split_calls, tool_names

Flag: TypeAlias = Literal["unparsed_tool_call", "unknown_tool", "scalar_arguments", "call_in_reasoning"]

FLAGS: Final[dict[Flag, str]] = {
    "unparsed_tool_call": "something begins like a call and is none; it stayed in the content",
    "unknown_tool": "a call names a tool that the request does not have",
    "scalar_arguments": "the arguments of a call are no JSON object",
    "call_in_reasoning": "the reasoning holds the markup of a call, which is no call there",
}


@frozen(kw_only=True)
class TurnText:
    """A turn's text, read.

    Attributes:
      content: what is neither reasoning nor call.
      reasoning: None where there is none.
      calls: in the order written.
      flags: what was unusual.
    """

    content: str
    reasoning: str | None
    calls: tuple[ParsedCall, ...]
    flags: tuple[Flag, ...]


def read_turn_text(
    text: str,
    *,
    reasoning_parser: ReasoningParser | None,
    tool_call_parser: ToolCallParser | None,
    tools: Sequence[JsonObject],
    opened: bool,
    chat_template_kwargs: JsonObject,
) -> TurnText:
    """Read a turn: its reasoning first, then the calls in what remains. Never raises for what a model wrote.

    Args:
      text: the turn, without its stop token.
      reasoning_parser: None: there is no reasoning.
      tool_call_parser: None: there are no calls.
      tools: those the turn may call; a call to another is flagged and stays a call.
      opened: the prompt has opened the reasoning already.
      chat_template_kwargs: the lineage's template arguments.
    """
    reasoning, content = None, text
    if reasoning_parser is not None:
        split = reasoning_parser.split(text, opened=opened, chat_template_kwargs=chat_template_kwargs)
        reasoning, content = split.reasoning, split.content
    if tool_call_parser is None:
        return TurnText(content=content, reasoning=reasoning, calls=(), flags=())
    found = split_calls(tool_call_parser, content, tools)
    names = tool_names(tools)
    flags: list[Flag] = []
    if found.n_unparsed:
        flags.append("unparsed_tool_call")
    if any(call.name not in names for call in found.calls):
        flags.append("unknown_tool")
    if not all(call.is_object for call in found.calls):
        flags.append("scalar_arguments")
    if reasoning is not None:
        inside = split_calls(tool_call_parser, reasoning, tools)
        if inside.calls or inside.n_unparsed:
            flags.append("call_in_reasoning")
    return TurnText(content=found.content, reasoning=reasoning, calls=found.calls, flags=tuple(flags))
