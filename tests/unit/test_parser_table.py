"""The parser table: what is committed for each kind of text by the parsers of this package; the docs show it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from builders_parsers import FORMATS, ROWS, read_row, row_id

from relax_trio.tokens.parsers.registry import REASONING_PARSERS, TOOL_CALL_PARSERS

ROOT = Path(__file__).parents[2]
CASES = {
    "clean call",
    "two calls",
    "text around a call",
    "truncated call",
    "call in reasoning",
    "unknown tool",
    "scalar arguments",
    "closing tag inside a JSON string",
    "unicode",
    "malformed JSON",
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row_id(row)}-{row['case']}")
def test_the_parsers_of_this_package_commit_what_the_table_says(row):
    name = row.get("reasoning_parser")
    read = read_row(row, TOOL_CALL_PARSERS[row["tool_call_parser"]], name and REASONING_PARSERS[name])
    assert read == (row["message"], row["flags"])


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_held_to_every_case(name):
    assert {row["case"] for row in ROWS if row["tool_call_parser"] == name} >= CASES


def test_every_parser_of_this_package_is_in_the_table():
    assert {row["tool_call_parser"] for row in ROWS} | {"qwen"} == set(TOOL_CALL_PARSERS)
    assert {row["reasoning_parser"] for row in ROWS if "reasoning_parser" in row} == set(REASONING_PARSERS)
    assert TOOL_CALL_PARSERS["qwen"] is TOOL_CALL_PARSERS["qwen25"]


def test_the_docs_hold_the_table_as_the_tool_prints_it():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/parser_table.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
