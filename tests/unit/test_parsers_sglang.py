"""SGLang's own parser classes behind our interface: the same table, the same rules, every name that SGLang knows.

Needs SGLang: tools/sglang_parsers_env makes an environment that has it.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from builders_parsers import (
    FORMATS,
    FRAGMENTS,
    ROWS,
    TOOLS,
    arguments,
    names,
    read_row,
    row_id,
    texts,
    tool_for,
    write_call,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.errors import ConfigError
from relax_trio.tokens.parsers.base import split_calls
from relax_trio.tokens.parsers.registry import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    reasoning_parser,
    tool_call_parser,
)
from relax_trio.tokens.parsers.sglang_load import load_sglang

if importlib.util.find_spec("sglang") is None:
    pytest.skip(
        "SGLang is not installed; tools/sglang_parsers_env makes an environment with it", allow_module_level=True
    )

pytestmark = pytest.mark.sglang

EXAMPLES = json.loads((Path(__file__).parents[1] / "data/parsers/sglang_formats.json").read_text())
"""`look(at="x")` in formats that only SGLang reads."""
FIRST_ONLY = {"cohere_command4", "mistral", "step3"}
"""SGLang takes only the first of several blocks; the others stay content."""
HEADED = {"inkling"}
"""A header before the call stays content."""
NEEDS_MORE = {"response_template"}
"""Made from a file of the checkpoint that only SGLang's server reads."""


def calls_of(split):
    return [(call.name, call.arguments) for call in split.calls]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row_id(row)}-{row['case']}")
def test_sglangs_classes_commit_what_the_table_says(row):
    calls, reasoning = tool_call_parser(row["tool_call_parser"]), reasoning_parser(row.get("reasoning_parser"))
    assert calls.implementation.startswith("SGLang ")
    assert reasoning is None or reasoning.implementation.startswith("SGLang ")
    assert read_row(row, calls, reasoning) == (row["message"], row["flags"])


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None)
@given(data=st.data())
def test_on_any_text_both_answer_alike(name, data):
    text = data.draw(texts(name))
    assert tool_call_parser(name).pieces(text, TOOLS) == TOOL_CALL_PARSERS[name].pieces(text, TOOLS)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None)
@given(data=st.data())
def test_of_any_call_both_read_the_same(name, data):
    function, given_arguments = data.draw(names), data.draw(arguments)
    text, tools = write_call(name, function, given_arguments), [tool_for(function, given_arguments)]
    assert split_calls(tool_call_parser(name), text, tools) == split_calls(TOOL_CALL_PARSERS[name], text, tools)


@pytest.mark.parametrize("name", REASONING_PARSERS)
@settings(deadline=None)
@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "\n", " ", "a"]), max_size=8).map("".join),
    opened=st.booleans(),
)
def test_of_any_reasoning_both_read_the_same(name, text, opened):
    sglang, own = reasoning_parser(name), REASONING_PARSERS[name]
    answers = [parser.split(text, opened=opened, chat_template_kwargs={}) for parser in (sglang, own)]
    assert answers[0] == answers[1]


def test_every_name_that_sglang_knows_is_accepted():
    sglang = load_sglang()
    for name in set(sglang.call_detectors) - NEEDS_MORE:
        assert type(tool_call_parser(name)).__name__ in ("SglangCalls", "SglangReading")
    for name in set(sglang.reasoning_detectors) - NEEDS_MORE:
        parser = reasoning_parser(name)
        assert parser.start
        assert parser.end
    assert set(TOOL_CALL_PARSERS) <= set(sglang.call_detectors)
    assert set(REASONING_PARSERS) <= set(sglang.reasoning_detectors)


@pytest.mark.parametrize("name", sorted(NEEDS_MORE))
def test_a_parser_that_cannot_be_made_is_refused_at_start(name):
    with pytest.raises(ConfigError, match=f"--agentic-tool-call-parser {name}: SGLang's parser cannot be made"):
        tool_call_parser(name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_call_in_a_format_that_only_sglang_reads(name):
    parser, example = tool_call_parser(name), EXAMPLES[name]
    header = "<|message_model|>look" if name in HEADED else ""
    assert split_calls(parser, example, TOOLS).content == header
    around = split_calls(parser, f"before {example} after", TOOLS)
    assert (around.content.split(), calls_of(around)) == (
        ["before", *header.split(), "after"],
        [("look", '{"at":"x"}')],
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_call_to_an_unknown_tool_reaches_the_agent(name):
    split = split_calls(tool_call_parser(name), EXAMPLES[name].replace("look", "fly"), TOOLS)
    assert calls_of(split) == [("fly", '{"at":"x"}')]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_truncated_call_stays_content(name):
    example = EXAMPLES[name]
    for length in range(len(example) // 3, len(example) * 2 // 3):
        split = split_calls(tool_call_parser(name), example[:length], TOOLS)
        assert (split.content, split.calls) == (example[:length], ()), length


@pytest.mark.parametrize("name", EXAMPLES)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_no_word_between_calls_is_lost(name, data):
    example = EXAMPLES[name]
    parts = data.draw(
        st.lists(st.sampled_from([example, example.replace('"x"', '"y"').replace(">x<", ">y<")]), max_size=5)
    )
    cut = data.draw(st.sampled_from(["", example[: len(example) // 2]]))
    text = "".join(f"word{index} {part} " for index, part in enumerate(parts)) + "end" + cut
    pieces = tool_call_parser(name).pieces(text, TOOLS)
    assert "".join(piece.text for piece in pieces) == text
    kept = "".join(piece.text for piece in pieces if piece.kind in ("text", "unparsed"))
    assert [word for word in re.findall(r"word\d|end", kept) if word in kept][-1] == "end"
    assert len(re.findall(r"word\d", kept)) == len(parts)


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_no_parser_raises_or_loses_text(data):
    sglang = load_sglang()
    words = [*EXAMPLES.values(), *(fragment for name in FORMATS for fragment in FRAGMENTS[name]), "<think>", "</think>"]
    text = data.draw(st.lists(st.sampled_from(words) | st.text(max_size=4), max_size=5).map("".join))
    for name in set(sglang.call_detectors) - NEEDS_MORE:
        assert "".join(piece.text for piece in tool_call_parser(name).pieces(text, TOOLS)) == text, name
    for name in set(sglang.reasoning_detectors) - NEEDS_MORE:
        parser = reasoning_parser(name)
        for opened in (False, True):
            split = parser.split(text, opened=opened, chat_template_kwargs={"enable_thinking": opened})
            kept = (split.reasoning or "") + split.content
            marks = re.compile(rf"{re.escape(parser.start)}|{re.escape(parser.end)}|<[^<>]*>|\[/?[A-Z_]+\]|\s")
            lost = marks.sub("", text)
            for letter in marks.sub("", kept):
                lost = lost.replace(letter, "", 1)
            assert not lost, (name, opened)


def test_a_call_with_many_arguments_is_read_in_time():
    """SGLang's own expression for this format takes exponential time in the number of arguments."""
    text = f"[look({', '.join(f'a{index}={index}' for index in range(60))})]"
    (call,) = split_calls(tool_call_parser("pythonic"), text, TOOLS).calls
    assert len(json.loads(call.arguments)) == 60


def test_nothing_of_the_process_or_the_request_is_changed():
    tools = copy.deepcopy(TOOLS)
    for name in (*FORMATS, *EXAMPLES):
        text = EXAMPLES.get(name) or write_call(name, "fly", {})
        assert split_calls(tool_call_parser(name), text, tools).calls
    assert tools == TOOLS
    assert "SGLANG_FORWARD_UNKNOWN_TOOLS" not in os.environ


def test_sglang_is_imported_when_a_parser_is_named_and_not_before():
    code = """
import sys
from relax_trio.tokens.parsers.registry import reasoning_parser, tool_call_parser
assert tool_call_parser(None) is None and reasoning_parser(None) is None
assert "sglang" not in sys.modules
assert tool_call_parser("qwen25") is not None
assert "sglang" in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
