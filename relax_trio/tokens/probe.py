"""What a chat template does with earlier turns: keeps them as generated (append-only) or rewrites them.

Each kind of turn is played as a short dialogue. What is recorded of it, piece by piece, is compared with the template's
own rendering of the whole: a template is append-only for the kind when the two are the same after every round. Recorded
lineages stay as generated either way; the report says where a template's own rendering would differ from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from attrs import frozen

from relax_trio.data.json import JsonObject
from relax_trio.data.messages import Message
from relax_trio.errors import InvalidRequest
from relax_trio.tokens.dialogues import THINKING, Dialogue, dialogues
from relax_trio.tokens.habits import Habits, argument_forms
from relax_trio.tokens.memory import Memory
from relax_trio.tokens.observation import ObservationRenderer, Tail
from relax_trio.tokens.turn_end import TurnEnds

Verdict: TypeAlias = Literal["append-only", "rewriting", "refused"]


@frozen(kw_only=True)
class Difference:
    """Where the recorded text and the template's own rendering part.

    Attributes:
      at: bytes that are the same.
      before: text just before that place, the same on both sides.
      recorded, template: what follows on either side.
    """

    at: int
    before: str
    recorded: str
    template: str


@frozen(kw_only=True)
class TurnProbe:
    """Finding for one kind of turn.

    Attributes:
      kind: name of the kind, with the template arguments that were set.
      verdict: what the template does with such turns.
      detail: the template's words where it refuses; when it rewrites, or what it never prints, where it rewrites.
      difference: the first one, for a rewriting kind.
    """

    kind: str
    verdict: Verdict
    detail: str = ""
    difference: Difference | None = None


@frozen(kw_only=True)
class ProbeReport:
    """Finding for one template.

    Attributes:
      turns: one finding for each kind of turn and value of enable_thinking that makes a difference.
      ends: how turns end.
      habits: the shapes of message it takes.
      mapping_form, text_form: how it prints tool-call arguments given as a mapping, and as JSON text.
      memory: what it remembers of a conversation's beginning.
      prints_date: it prints the current date.
      variables: names it reads from outside.
    """

    turns: tuple[TurnProbe, ...]
    ends: TurnEnds
    habits: Habits
    mapping_form: str
    text_form: str
    memory: Memory
    prints_date: bool
    variables: frozenset[str]

    @property
    def rewriting(self) -> tuple[str, ...]:
        """Kinds of turn that the template rewrites."""
        return tuple(turn.kind for turn in self.turns if turn.verdict == "rewriting")

    @property
    def rewriting_text(self) -> str:
        """Those kinds in words, "" where there is none."""
        taken = [turn for turn in self.turns if turn.verdict != "refused"]
        return "every kind of turn" if 1 < len(taken) == len(self.rewriting) else ", ".join(self.rewriting)


def probe_template(observations: ObservationRenderer) -> ProbeReport:
    """Play every kind of turn. Renders some hundred short conversations: a fraction of a second."""
    template = observations.template
    turns: list[TurnProbe] = []
    for kwargs in _arguments(observations):
        suffix = "".join(f", {name} {str(value).lower()}" for name, value in kwargs.items())
        turns += [_play(observations, dialogue, dialogue.kind + suffix) for dialogue in dialogues(kwargs)]
    mapping_form, text_form = argument_forms(template.render_chat)
    return ProbeReport(
        turns=tuple(turns),
        ends=observations.ends,
        habits=template.habits,
        mapping_form=mapping_form,
        text_form=text_form,
        memory=observations.memory,
        prints_date=template.prints_date,
        variables=template.variables,
    )


def _arguments(observations: ObservationRenderer) -> Iterator[JsonObject]:
    """No template arguments, then each value of enable_thinking under which a prompt looks otherwise."""
    yield {}
    if THINKING not in observations.template.variables:
        return
    question = (Message(role="user", content="x"),)
    unsaid = observations.template.render(question, (), {}, add_generation_prompt=True)
    for value in (True, False):
        kwargs: JsonObject = {THINKING: value}
        if observations.template.render(question, (), kwargs, add_generation_prompt=True) != unsaid:
            yield kwargs


def _play(observations: ObservationRenderer, dialogue: Dialogue, kind: str) -> TurnProbe:
    try:
        found = _first_change(observations, dialogue)
    except InvalidRequest as exc:
        return TurnProbe(kind=kind, verdict="refused", detail=exc.message)
    if found is None:
        return TurnProbe(kind=kind, verdict="append-only")
    detail, difference = found
    return TurnProbe(kind=kind, verdict="rewriting", detail=detail, difference=difference)


def _first_change(observations: ObservationRenderer, dialogue: Dialogue) -> tuple[str, Difference | None] | None:
    """Play to the first round after which the recorded text is not the template's: when that is, and where."""
    whens = ("when the next messages come", "when a further user message comes")
    history = dialogue.opening
    recorded = _render(observations, dialogue, history, prompt=True)
    for when, (turn, following) in zip(whens, dialogue.rounds, strict=True):
        alone = _render(observations, dialogue, (*history, turn), prompt=False)
        tail = observations.render(following, dialogue.tools, dialogue.kwargs, turn=turn, earlier=history)
        history = (*history, turn, *following)
        later = _render(observations, dialogue, history, prompt=True)
        generated = _generated(observations, turn, recorded, alone, later, tail)
        if generated is None:
            return when, difference(recorded, later)
        recorded += generated + _supplied(observations, generated, tail)
        if recorded != later:
            return when, difference(recorded, later)
        lost = [text for text in _texts(turn) if text not in generated]
        said = [message.content for message in following if isinstance(message.content, str)]
        lost += [text for text in said if text not in tail.text]
        if lost:
            return f"it never prints {lost[0]!r}", None
    return None


def _render(
    observations: ObservationRenderer, dialogue: Dialogue, history: tuple[Message, ...], *, prompt: bool
) -> str:
    return observations.template.render(history, dialogue.tools, dialogue.kwargs, add_generation_prompt=prompt)


def _generated(
    observations: ObservationRenderer, turn: Message, prompt: str, alone: str, later: str, tail: Tail
) -> str | None:
    """The turn as the template itself prints it, to and with its stop token; None where it isn't behind `prompt`.

    As the last message if it can be found there, because that is the form a model learns to generate.
    """
    if alone.startswith(prompt):
        body = alone[len(prompt) :]
        at = max((body.rfind(text) + len(text) for text in _texts(turn) if text in body), default=0)
        end = observations.find_closer(body, at)
        return body if end is None else body[: end.end]
    if later.startswith(prompt) and later.endswith(tail.text):
        closing = tail.end if tail.end in observations.ends.closers else ""
        return later[len(prompt) : len(later) - len(tail.text)] + closing
    return None


def _supplied(observations: ObservationRenderer, generated: str, tail: Tail) -> str:
    closed = tail.end and generated.endswith(tuple(observations.ends.closers))
    return tail.text[len(tail.end) :] if closed else tail.text


def _texts(turn: Message) -> list[str]:
    said = [text for text in (turn.reasoning_content, turn.content) if isinstance(text, str)]
    for call in turn.tool_calls:
        values = (call.arguments_object() or {}).values()
        said += [call.name, *(str(value) for value in values)]
    return said


def difference(recorded: str, template: str, shown: int = 40) -> Difference:
    """Where two texts part, with some text around it."""
    pairs = zip(recorded, template, strict=False)
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(recorded), len(template)))
    return Difference(
        at=len(recorded[:at].encode()),
        before=recorded[max(0, at - shown) : at],
        recorded=recorded[at : at + shown],
        template=template[at : at + shown],
    )
