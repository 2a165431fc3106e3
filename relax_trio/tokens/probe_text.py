"""A probe's report as text for a person."""

from __future__ import annotations

from collections.abc import Iterator

from relax_trio.tokens.probe import ProbeReport, TurnProbe
from relax_trio.tokens.turn_end import TurnEnd

_INPUTS = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"})
_MEMORY = {
    "nothing": "nothing",
    "shape": "whether there were turns and tool results before",
    "count": "the number of turns or calls before; an observation costs more the longer the history is",
}


def report_lines(report: ProbeReport) -> list[str]:
    """Lines for a person: what the template takes, how turns end, and a line or more for each kind of turn."""
    width = max(len(turn.kind) for turn in report.turns)
    return [
        *(f"{label:<12}{text}" for label, text in _takes(report)),
        "",
        *(line for turn in report.turns for line in _turn_lines(turn, width)),
    ]


def _takes(report: ProbeReport) -> Iterator[tuple[str, str]]:
    habits = report.habits
    yield "variables", ", ".join(sorted(report.variables - _INPUTS)) or "none besides messages and tools"
    yield (
        "arguments",
        f"given as {'JSON text' if habits.arguments_as_text else 'mappings'}"
        + ("; what is no object is wrapped in one" if habits.wraps_scalars else ""),
    )
    yield (
        "",
        f"a mapping is printed {report.mapping_form}, JSON text {report.text_form}".replace(
            "printed refused", "refused"
        ).replace("printed not printed", "not printed"),
    )
    yield "call ids", "given as nine letters or digits" if habits.short_ids else "as they are"
    yield "reasoning", f"read from {habits.reasoning_key}" if habits.prints_reasoning else "never printed"
    first = "as it is" if habits.first_system else "as a user message"
    later = "" if habits.later_system else "; a later one as a user message"
    refused = "refused; as a user message, one with its neighbour where roles alternate"
    yield "system", refused if habits.refuses_system else first + later
    yield "remembers", _MEMORY[report.memory]
    if report.prints_date:
        yield "date", "printed; it stays that of the start of the run"
    yield "plain turn", _end(report.ends.plain)
    yield "calls", "not printed" if report.ends.calls is None else _end(report.ends.calls)
    yield "stops", " ".join(report.ends.stops)


def _end(end: TurnEnd) -> str:
    if end.closed:
        return f"ends with {end.text!r}, then {end.separator!r}"
    if end.text:
        return f"is not closed; the next message's tag follows, such as {end.text!r}"
    return "is not closed; the next message follows without a control token"


def _turn_lines(turn: TurnProbe, width: int) -> Iterator[str]:
    at = "" if turn.difference is None else f", at byte {turn.difference.at}"
    detail = f"  {turn.detail}{at}" if turn.detail else ""
    yield f"{turn.kind:<{width}}  {turn.verdict:<11}{detail}".rstrip()
    if turn.difference is not None:
        before = turn.difference.before
        yield f"    recorded  {before + turn.difference.recorded!r}"
        yield f"    template  {before + turn.difference.template!r}"
