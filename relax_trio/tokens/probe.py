"""What a chat template does with earlier turns: keeps them as generated (append-only) or rewrites them.

Each kind of turn is played as a short dialogue. The prompts of its successive requests are rendered; a template is
append-only for the kind when each prompt begins with the one before it and still holds all that was generated. Recorded
lineages stay as generated either way; the report says where a template's own rendering would differ from them.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from attrs import field, frozen

from relax_trio.data.json import JsonObject
from relax_trio.data.messages import Message, ToolCall
from relax_trio.errors import InvalidRequest
from relax_trio.tokens.template import ChatTemplate
from relax_trio.tokens.turn_end import TurnEnd

Verdict: TypeAlias = Literal["append-only", "rewriting", "refused"]

_TOOL: Final[JsonObject] = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}
_SHOWN_CHARS: Final = 60


@frozen(kw_only=True)
class TurnProbe:
    """Finding for one kind of turn; `detail` holds the first difference, or the template's refusal."""

    kind: str
    verdict: Verdict
    detail: str = ""


@frozen(kw_only=True)
class ProbeReport:
    """Finding for one template.

    Attributes:
      turns: one finding per kind of turn.
      turn_ends: end-of-turn token and separator, after plain turns and after tool calls where they differ.
      variables: names the template reads from outside.
    """

    turns: tuple[TurnProbe, ...]
    turn_ends: tuple[TurnEnd, ...]
    variables: frozenset[str]

    @property
    def rewriting(self) -> tuple[str, ...]:
        """Kinds of turn that the template rewrites."""
        return tuple(turn.kind for turn in self.turns if turn.verdict == "rewriting")


@frozen(kw_only=True)
class _Dialogue:
    """`opening`, then pairs of a generated turn and the messages that follow it."""

    kind: str
    opening: tuple[Message, ...]
    turns: tuple[tuple[Message, tuple[Message, ...]], ...]
    tools: tuple[JsonObject, ...] = ()
    kwargs: JsonObject = field(factory=dict)


def probe_template(template: ChatTemplate, turn_ends: tuple[TurnEnd, ...]) -> ProbeReport:
    """Play every kind of turn through `template`. Renders about twenty short conversations."""
    dialogues = [*_dialogues({}, "")]
    if "enable_thinking" in template.variables:
        dialogues += _dialogues({"enable_thinking": False}, ", enable_thinking false")
    return ProbeReport(
        turns=tuple(_play(template, dialogue) for dialogue in dialogues),
        turn_ends=turn_ends,
        variables=template.variables,
    )


def _play(template: ChatTemplate, dialogue: _Dialogue) -> TurnProbe:
    history = list(dialogue.opening)
    generated: list[str] = []
    try:
        prompt = template.render(history, dialogue.tools, dialogue.kwargs, add_generation_prompt=True)
        for turn, following in dialogue.turns:
            history += [turn, *following]
            generated += _texts(turn)
            later = template.render(history, dialogue.tools, dialogue.kwargs, add_generation_prompt=True)
            if not later.startswith(prompt):
                return TurnProbe(kind=dialogue.kind, verdict="rewriting", detail=_difference(prompt, later))
            lost = [text for text in generated if text not in later]
            if lost:
                return TurnProbe(kind=dialogue.kind, verdict="rewriting", detail=f"drops {lost[0]!r} later")
            prompt = later
    except InvalidRequest as exc:
        return TurnProbe(kind=dialogue.kind, verdict="refused", detail=exc.message)
    return TurnProbe(kind=dialogue.kind, verdict="append-only")


def _texts(turn: Message) -> list[str]:
    said = [text for text in (turn.reasoning_content, turn.content) if isinstance(text, str)]
    return [*said, *(call.name for call in turn.tool_calls)]


def _difference(earlier: str, later: str) -> str:
    pairs = zip(earlier, later, strict=False)
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(earlier), len(later)))
    start = max(0, at - _SHOWN_CHARS // 2)
    return (
        f"at byte {len(earlier[:at].encode())}: sent {earlier[start : at + _SHOWN_CHARS]!r}, "
        f"later {later[start : at + _SHOWN_CHARS]!r}"
    )


def _dialogues(kwargs: JsonObject, suffix: str) -> list[_Dialogue]:
    user = Message(role="user", content="question one")
    again = Message(role="user", content="question two")
    system = Message(role="system", content="rule one")
    closing = (Message(role="assistant", content="answer last"), (Message(role="user", content="question last"),))
    plain = Message(role="assistant", content="answer one")
    thought = Message(role="assistant", content="answer one", reasoning_content="thought one")
    shapes: list[tuple[str, tuple[Message, ...], Message, tuple[Message, ...], bool]] = [
        ("plain", (user,), plain, (again,), False),
        ("system", (system, user), plain, (again,), False),
        ("system later", (user,), plain, (system, again), False),
        ("tools", (system, user), plain, (again,), True),
        ("reasoning", (user,), thought, (again,), False),
        ("one tool call", (user,), _calling(1), _results(1), True),
        ("several tool calls", (user,), _calling(2), _results(2), True),
        ("empty tool result", (user,), _calling(1), (_result(0, ""),), True),
        ("reasoning with a tool call", (user,), _calling(1, "thought one"), _results(1), True),
        ("arguments that are no object", (user,), _calling(1, arguments="[1]"), _results(1), True),
    ]
    return [
        _Dialogue(
            kind=name + suffix,
            opening=opening,
            turns=((turn, following), closing),
            tools=(_TOOL,) if with_tools else (),
            kwargs=kwargs,
        )
        for name, opening, turn, following, with_tools in shapes
    ]


def _calling(n_calls: int, reasoning: str | None = None, arguments: str = '{"at":"x"}') -> Message:
    calls = tuple(ToolCall(id=f"call0000{index}", name="look", arguments=arguments) for index in range(n_calls))
    return Message(role="assistant", reasoning_content=reasoning, tool_calls=calls)


def _results(n_results: int) -> tuple[Message, ...]:
    return tuple(_result(index, f"result {index}") for index in range(n_results))


def _result(index: int, content: str) -> Message:
    return Message(role="tool", content=content, tool_call_id=f"call0000{index}")


def report_lines(report: ProbeReport) -> list[str]:
    """Lines for a person: one per kind of turn, its verdict, and the first difference where there is one."""
    return [f"{turn.kind}: {turn.verdict}{f' ({turn.detail})' if turn.detail else ''}" for turn in report.turns]
