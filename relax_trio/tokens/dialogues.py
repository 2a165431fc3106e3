"""The short dialogues that the probe plays, one for each kind of turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from attrs import field, frozen

from relax_trio.data.json import JsonObject, canonical_json
from relax_trio.data.messages import Message, ToolCall

Round = tuple[Message, tuple[Message, ...]]
"""A generated turn and the messages that follow it."""

THINKING: Final = "enable_thinking"
"""The template argument that turns reasoning on and off."""
LOOK: Final[JsonObject] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
_USER: Final = Message(role="user", content="question one")
_AGAIN: Final = Message(role="user", content="question two")
_SYSTEM: Final = Message(role="system", content="rule one")
_ANSWER: Final = Message(role="assistant", content="answer one")
_THOUGHT: Final = Message(role="assistant", content="answer one", reasoning_content="thought one")
_CLOSING: Final[Round] = (
    Message(role="assistant", content="answer last"),
    (Message(role="user", content="question last"),),
)


@frozen(kw_only=True)
class Dialogue:
    """A kind of turn, played: `rounds` follow `opening`; the first has the kind, the second closes.

    Attributes:
      kind: name of the kind, e.g. "one tool call".
      kwargs: template arguments; their effect is part of no name.
    """

    kind: str
    opening: tuple[Message, ...]
    rounds: tuple[Round, ...]
    tools: tuple[JsonObject, ...] = ()
    kwargs: JsonObject = field(factory=dict)


def dialogues(kwargs: JsonObject) -> Iterator[Dialogue]:
    """One dialogue for each kind of turn, under these template arguments; none with reasoning where it is off."""
    for kind, opening, turn, following, with_tools in _shapes():
        if turn.reasoning_content is not None and kwargs.get(THINKING) is False:
            continue
        yield Dialogue(
            kind=kind,
            opening=opening,
            rounds=((turn, following), _CLOSING),
            tools=(LOOK,) if with_tools else (),
            kwargs=kwargs,
        )


def _shapes() -> Iterator[tuple[str, tuple[Message, ...], Message, tuple[Message, ...], bool]]:
    yield "plain", (_USER,), _ANSWER, (_AGAIN,), False
    yield "system", (_SYSTEM, _USER), _ANSWER, (_AGAIN,), False
    yield "system later", (_USER,), _ANSWER, (_SYSTEM, _AGAIN), False
    yield "tools", (_SYSTEM, _USER), _ANSWER, (_AGAIN,), True
    yield "reasoning", (_USER,), _THOUGHT, (_AGAIN,), False
    yield "one tool call", (_USER,), _calling(1), _results(1), True
    yield "several tool calls", (_USER,), _calling(2), _results(2), True
    yield "text beside a tool call", (_USER,), _calling(1, content="answer one"), _results(1), True
    yield "reasoning with a tool call", (_USER,), _calling(1, reasoning="thought one"), _results(1), True
    yield "empty tool result", (_USER,), _calling(1), (_result(0, ""),), True
    yield "tool result and a user message", (_USER,), _calling(1), (*_results(1), _AGAIN), True
    yield "arguments that are no object", (_USER,), _calling(1, arguments='["place one"]'), _results(1), True


def _calling(
    n_calls: int, *, content: str | None = None, reasoning: str | None = None, arguments: str | None = None
) -> Message:
    calls = tuple(
        ToolCall(id=_call_id(index), name="look", arguments=arguments or canonical_json({"at": f"place {index}"}))
        for index in range(n_calls)
    )
    return Message(role="assistant", content=content, reasoning_content=reasoning, tool_calls=calls)


def _results(n_results: int) -> tuple[Message, ...]:
    return tuple(_result(index, f"result {index}") for index in range(n_results))


def _result(index: int, content: str) -> Message:
    return Message(role="tool", content=content, tool_call_id=_call_id(index))


def _call_id(index: int) -> str:
    return f"call_{index:024x}"
