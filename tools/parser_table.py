"""The parser table of docs/parsers.md: what is committed for each text of tests/data/parsers/table.json.

Prints it; `--write` puts it into the page, `--check` fails when the page holds another. What it shows is what the
parsers of this package answer; the tests hold the answers, and those of SGLang's classes, to the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from relax_trio.data.json import JsonObject
from relax_trio.tokens.parsers.registry import REASONING_PARSERS, TOOL_CALL_PARSERS
from relax_trio.tokens.parsers.turn import read_turn_text

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/parsers.md"
DATA = ROOT / "tests/data/parsers/table.json"
BEGIN, END = "<!-- made by tools/parser_table.py -->\n", "<!-- end of table -->\n"
COMMAND = "python tools/parser_table.py --write"


def table() -> str:
    """The table as Markdown, a section for each parser."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    sections: dict[str, list[str]] = {}
    for row in data["rows"]:
        title = row["tool_call_parser"]
        if "reasoning_parser" in row and row["case"] != "call in reasoning":
            title = f"{row['reasoning_parser']} (reasoning)"
        sections.setdefault(title, []).append(_row(row, data["tools"]))
    head = "| case | the model wrote | committed | flags |\n|---|---|---|---|\n"
    return "\n".join(f"### {title}\n\n{head}{''.join(rows)}" for title, rows in sections.items())


def _row(row: JsonObject, tools: list[JsonObject]) -> str:
    reasoning = row.get("reasoning_parser")
    text = str(row["text"])
    read = read_turn_text(
        text,
        reasoning_parser=None if reasoning is None else REASONING_PARSERS[str(reasoning)],
        tool_call_parser=TOOL_CALL_PARSERS[str(row["tool_call_parser"])],
        tools=tools,
        opened=bool(row.get("prompt_opens_reasoning")),
        chat_template_kwargs={},
    )
    parts = [] if read.reasoning is None else [f"reasoning {_code(read.reasoning)}"]
    parts += [f"content {_code(read.content)}"] if read.content or not (read.reasoning or read.calls) else []
    parts += [f"call {_code(call.name + ' ' + call.arguments)}" for call in read.calls]
    return f"| {row['case']} | {_code(text)} | {'<br>'.join(parts)} | {'<br>'.join(read.flags)} |\n"


def _code(text: str) -> str:
    """A code span of a table's cell; line breaks are shown as ⏎."""
    return f"`{text}`".replace("\n", "⏎").replace("|", "\\|") if text else "empty"


def main(words: list[str]) -> int:
    """Print, write or check."""
    if not words:
        sys.stdout.write(table())
        return 0
    page = PAGE.read_text(encoding="utf-8")
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    wanted = page[:begin] + "\n" + table() + "\n" + page[end:]
    if words == ["--write"]:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    if words == ["--check"] and page != wanted:
        sys.stderr.write(f"{PAGE.relative_to(ROOT)} holds another table than the parsers give; run {COMMAND}\n")
        return 1
    return 0 if words == ["--check"] else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
