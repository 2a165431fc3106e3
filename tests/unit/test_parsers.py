"""The parser table: what each parser makes of a text, and that none loses any."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.errors import ConfigError
from relax_trio.tokens.parsers.registry import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    reasoning_parser,
    tool_call_parser,
)


def call(body):
    return f"<tool_call>\n{body}\n</tool_call>"


LOOK = '{"name": "look", "arguments": {"at": "x"}}'
QWEN_TABLE = {
    "clean call": (call(LOOK), "", [("look", '{"at":"x"}', True)], 0),
    "two calls": (f"{call(LOOK)}\n{call(LOOK)}", "", [("look", '{"at":"x"}', True)] * 2, 0),
    "text around a call": (f"before\n{call(LOOK)}\nafter", "before\n\nafter", [("look", '{"at":"x"}', True)], 0),
    "no call": ("  just text\n", "  just text\n", [], 0),
    "truncated call": ('<tool_call>\n{"name": "lo', '<tool_call>\n{"name": "lo', [], 1),
    "missing end tag": (f"<tool_call>{LOOK}", f"<tool_call>{LOOK}", [], 1),
    "malformed JSON": (call('{"name": look}'), call('{"name": look}'), [], 1),
    "a good call after a bad one": (
        call("{") + call(LOOK),
        call("{"),
        [("look", '{"at":"x"}', True)],
        1,
    ),
    "no name": (call('{"arguments": {}}'), call('{"arguments": {}}'), [], 1),
    "a list": (call("[1]"), call("[1]"), [], 1),
    "no arguments": (call('{"name": "look"}'), "", [("look", "{}", True)], 0),
    "parameters": (
        call('{"name": "look", "parameters": {"b": 1, "a": 2.0}}'),
        "",
        [("look", '{"a":2,"b":1}', True)],
        0,
    ),
    "number": (call('{"name": "look", "arguments": 5.0}'), "", [("look", "5", False)], 0),
    "string": (call('{"name": "look", "arguments": "x"}'), "", [("look", '"x"', False)], 0),
    "null": (call('{"name": "look", "arguments": null}'), "", [("look", "null", False)], 0),
    "closing tag inside a string": (
        call('{"name": "look", "arguments": {"at": "</tool_call>"}}'),
        "",
        [("look", '{"at":"</tool_call>"}', True)],
        0,
    ),
    "unicode": (call('{"name": "look", "arguments": {"at": "\\u00e9é"}}'), "", [("look", '{"at":"éé"}', True)], 0),
    "lone surrogate": (call('{"name": "look", "arguments": "\\ud800"}'), "", [("look", '"\ufffd"', False)], 0),
    "NaN": (
        call('{"name": "look", "arguments": {"a": NaN}}'),
        call('{"name": "look", "arguments": {"a": NaN}}'),
        [],
        1,
    ),
    "infinity": (
        call('{"name": "f", "arguments": {"a": 1e999}}'),
        call('{"name": "f", "arguments": {"a": 1e999}}'),
        [],
        1,
    ),
}


@pytest.mark.parametrize("name", ["qwen25", "hermes"])
@pytest.mark.parametrize("case", QWEN_TABLE)
def test_tagged_json_calls(name, case):
    text, content, calls, n_unparsed = QWEN_TABLE[case]
    split = tool_call_parser(name).split(text)
    assert split.content == content
    assert [(c.name, c.arguments, c.is_object) for c in split.calls] == calls
    assert split.n_unparsed == n_unparsed


def test_nesting_without_end_is_text():
    text = "<tool_call>" + "[" * 100_000
    assert tool_call_parser("qwen25").split(text).content == text


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([call(LOOK), "<tool_call>", "</tool_call>", "{", "}", '"', "\\", '{"name": "f"}', "\n"])
        | st.text(max_size=4),
        max_size=8,
    ).map("".join)
)
def test_no_text_is_lost(text):
    split = tool_call_parser("qwen25").split(text)
    outside = re.sub(r"\s", "", text)
    assert len(re.sub(r"\s", "", split.content)) <= len(outside)
    if not split.calls:
        assert split.content == text
    else:
        for character in set(re.sub(r"\s", "", split.content)):
            assert character in outside
    n_markers = text.count("<tool_call>")
    assert len(split.calls) + split.n_unparsed <= n_markers


REASONING_TABLE = {
    # text, opened → qwen3, deepseek-r1
    ("<think>\nhm\n</think>\n\nyes", False): (("hm", "yes"), ("hm", "yes")),
    ("\n<think>hm</think>yes", False): (("hm", "yes"), ("hm", "yes")),
    ("hm</think>yes", True): (("hm", "yes"), ("hm", "yes")),
    ("hm</think>yes", False): ((None, "hm</think>yes"), ("hm", "yes")),
    ("<think>hm", False): (("hm", ""), ("hm", "")),
    ("hm", True): (("hm", ""), ("hm", "")),
    (" plain ", False): ((None, " plain "), ("plain", "")),
    ("<think></think>yes", False): ((None, "yes"), (None, "yes")),
    ("<think>a</think>b</think>c", False): (("a", "b</think>c"), ("a", "b</think>c")),
    ("say <think>", False): ((None, "say <think>"), ("say <think>", "")),
    ("", False): ((None, ""), (None, "")),
}


@pytest.mark.parametrize(("text", "opened"), REASONING_TABLE)
def test_tagged_reasoning(text, opened):
    for name, wanted in zip(("qwen3", "deepseek-r1"), REASONING_TABLE[text, opened], strict=True):
        split = reasoning_parser(name).split(text, opened=opened)
        assert (split.reasoning, split.content) == wanted, name


def test_names_are_checked():
    assert reasoning_parser(None) is None
    assert tool_call_parser(None) is None
    assert all(reasoning_parser(name) for name in REASONING_PARSERS)
    assert all(tool_call_parser(name) for name in TOOL_CALL_PARSERS)
    with pytest.raises(ConfigError, match=r"--agentic-reasoning-parser qwen25: .*deepseek-r1, qwen3"):
        reasoning_parser("qwen25")
    with pytest.raises(ConfigError, match=r"--agentic-tool-call-parser qwen3: .*hermes, qwen25"):
        tool_call_parser("qwen3")
