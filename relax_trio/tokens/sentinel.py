"""Stand-ins for a generated turn, whose text is recorded and never rendered again.

A stand-in has the turn's shape: reasoning, content and calls where the turn has them, because some templates end a turn
that made calls otherwise, or check a result's call id. Each of its texts is a mark, so that what the template prints
behind the turn is what stands behind the last mark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from attrs import evolve, frozen

from relax_trio.data.json import canonical_json
from relax_trio.data.messages import Message, ToolCall

SENTINEL: Final = "qzRelaxTurnSentinel7Kqz"
"""A mark: plain letters, so that no template trims, splits or escapes it."""

_IN_CALL: Final = "Call"
OPENING: Final = Message(role="user", content="x")
"""The user message that a stand-in answers."""


@frozen
class Behind:
    """What a template prints behind a stand-in.

    Attributes:
      text: what stands behind the last mark.
      within: what stands between the first mark and the last.
      in_call: the last mark is that of a call.
    """

    text: str
    within: str
    in_call: bool


def stand_ins(turn: Message, mark: str) -> Iterator[Message]:
    """Stand-ins for `turn` to try, the most faithful first: a template may refuse one, or print none of its marks."""
    arguments = canonical_json({"x": mark + _IN_CALL})
    calls = tuple(ToolCall(id=call.id, name=call.name, arguments=arguments) for call in turn.tool_calls)
    reasons = turn.reasoning_content is not None
    faithful = Message(
        role="assistant",
        content=mark if turn.content or not (calls or reasons) else None,
        reasoning_content=mark if reasons else None,
        tool_calls=calls,
    )
    yield faithful
    if calls:
        yield evolve(faithful, content=None, reasoning_content=None)
        yield evolve(faithful, content=None, reasoning_content=None, tool_calls=calls[-1:])
        yield evolve(faithful, content=mark)
    yield Message(role="assistant", content=mark)


def mark_for(messages: Sequence[Message]) -> str:
    """A mark that occurs in none of the texts of `messages`."""
    texts = [text for message in messages for text in message.texts]
    mark = SENTINEL
    while any(mark in text for text in texts):
        mark += "z"
    return mark


def behind(text: str, mark: str) -> Behind | None:
    """What stands behind the last mark, None where the template printed none."""
    head, found, tail = text.rpartition(mark)
    if not found:
        return None
    return Behind(tail.removeprefix(_IN_CALL), head.partition(mark)[2], tail.startswith(_IN_CALL))


def moved(before: str, after: str, messages: Sequence[Message]) -> bool:
    """Whether one of `messages` is printed in `before`, but not in `after`, where it belongs."""
    contents = [text for message in messages for text in message.texts]
    return any(content in before and content not in after for content in contents)
