"""The table of docs/templates.md: family × kind of turn × exact.

Prints it; `--write` puts it into the page, `--check` fails when the page holds another. A cell is computed by the check
of exactness that the tests run: the kind of turn is played with the family's template and tokenizer, and every
observation compared, token by token, with the template's own rendering of the whole. Exits with 1 if one differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # where the families and the check are

from template_exactness import Stopped, play_exactly  # noqa: E402
from template_families import FAMILIES, Family  # noqa: E402

from relax_trio.tokens.dialogues import THINKING, Dialogue, dialogues  # noqa: E402

PAGE = ROOT / "docs/templates.md"
BEGIN, END = "<!-- table: python tools/template_table.py --write -->\n", "<!-- end of table -->\n"
NOT_EXACT = "NOT EXACT"
WORDS = {
    "append-only": "exact",
    "rewriting": "exact, rewrites",
    "rewriting later": "exact, rewrites later",
    "refused": "refused",
}
STOPS: tuple[Stopped, ...] = ("by its limit", "by a stop string", "by another stop token")


def table() -> str:
    """The table as Markdown: a row for each kind of turn, a column for each family."""
    lines = [
        "| kind of turn | " + " | ".join(family.title for family in FAMILIES) + " |",
        "|---|" + "---|" * len(FAMILIES),
    ]
    for title, dialogue, stopped in _rows():
        cells = [_cell(family, dialogue, stopped) for family in FAMILIES]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _rows() -> Iterator[tuple[str, Dialogue, Stopped]]:
    played = list(dialogues({}))
    for dialogue in played:
        yield dialogue.kind, dialogue, "by a stop token"
    for dialogue in dialogues({THINKING: False}):
        yield f"{dialogue.kind}, `{THINKING}` false", dialogue, "by a stop token"
    for kind in ("plain", "one tool call"):
        for stopped in STOPS:
            yield f"{kind}, stopped {stopped}", next(d for d in played if d.kind == kind), stopped


def _cell(family: Family, dialogue: Dialogue, stopped: Stopped) -> str:
    if dialogue.kwargs and THINKING not in family.codec.template.variables:
        return "–"
    if family.one_call and dialogue.kind == "several tool calls":
        return "one call a turn"
    if stopped == "by another stop token" and len(family.stops) == 1:
        return "–"
    try:
        return WORDS[play_exactly(family, dialogue.opening, dialogue.rounds, dialogue.tools, dialogue.kwargs, stopped)]
    except AssertionError as exc:
        print(f"{family.name}, {dialogue.kind}, stopped {stopped}: {exc}", file=sys.stderr)
        return NOT_EXACT


def main(words: list[str]) -> int:
    """Print, write or check."""
    made = table()
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    held, _, after = rest.partition(END)
    if words == ["--write"]:
        PAGE.write_text(before + BEGIN + made + END + after, encoding="utf-8")
    elif words == ["--check"]:
        if held != made:
            print(f"{PAGE.name} holds another table; run python tools/template_table.py --write", file=sys.stderr)
            return 1
    else:
        print(made, end="")
    return 1 if NOT_EXACT in made else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
