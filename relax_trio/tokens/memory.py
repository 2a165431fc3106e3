"""What a template remembers of a conversation's beginning when it prints later messages.

Most remember nothing. Some print a tool result otherwise once there was one before; few number the calls of the whole
conversation. The small conversation from which observations are rendered has to hold what the template remembers: the
shape of the beginning, or, for one that counts, every earlier message without its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias

from attrs import evolve

from relax_trio.data.messages import Message, ToolCall
from relax_trio.tokens.sentinel import OPENING

Memory: TypeAlias = Literal["nothing", "shape", "count"]
Past: TypeAlias = tuple[Message, ...]

_ANSWER: Final = Message(role="assistant", content="z")


def remembered(memory: Memory, earlier: Sequence[Message]) -> Past:
    """What stands between the leading system message and the turn's stand-in; of constant size unless it counts."""
    if memory == "nothing":
        return (OPENING,)
    rest = earlier[int(bool(earlier) and earlier[0].role == "system") :]
    if memory == "count":
        return tuple(map(_without_text, rest)) or (OPENING,)
    last_user = max((index for index, message in enumerate(rest) if message.role == "user"), default=0)
    closed, current = rest[:last_user], rest[last_user:]
    past: Past = (OPENING,)
    if any(message.role == "tool" for message in closed):
        past += (*_tool_round(0), _ANSWER, OPENING)
    elif any(message.role == "assistant" for message in closed):
        past += (_ANSWER, OPENING)
    return past + _tool_round(1) if any(message.role == "tool" for message in current) else past


def find_memory(tail: Callable[[Past], str | None]) -> Memory:
    """Find what a template remembers.

    Args:
      tail: what it prints behind a turn that follows these messages; None where it refuses them.
    """
    plain, tools = (_ANSWER, OPENING), (*_tool_round(0), _ANSWER, OPENING)
    again = (*_tool_round(1), _ANSWER, OPENING)
    once = [tail((OPENING, *past)) for past in (plain, tools, _tool_round(0))]
    twice = [tail((OPENING, *past)) for past in (plain + plain, tools + again, (*_tool_round(0), *_tool_round(1)))]
    if any(one != two for one, two in zip(once, twice, strict=True) if one is not None and two is not None):
        return "count"
    known = {text for text in (tail((OPENING,)), *once) if text is not None}
    return "shape" if len(known) > 1 else "nothing"


def _tool_round(number: int) -> Past:
    call = ToolCall(id=f"pastcall{number}", name="f", arguments="{}")
    return (
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", content="y", tool_call_id=call.id),
    )


def _without_text(message: Message) -> Message:
    return evolve(
        message,
        content="x" if message.content else message.content,
        reasoning_content=None if message.reasoning_content is None else "x",
        tool_calls=tuple(evolve(call, arguments="{}") for call in message.tool_calls),
    )
