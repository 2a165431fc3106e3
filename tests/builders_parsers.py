"""The parser table, random texts of each call format, and calls written in each format."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import strategies as st

from relax_trio.data.messages import ToolCall
from relax_trio.data.normalize import assistant_message
from relax_trio.tokens.parsers.turn import read_turn_text

TABLE = json.loads((Path(__file__).parent / "data/parsers/table.json").read_text())
TOOLS = TABLE["tools"]
ROWS = TABLE["rows"]
FORMATS = ("qwen25", "hermes", "qwen3_coder", "llama3", "pythonic")


def row_id(row):
    return "-".join([row["tool_call_parser"], *([row["reasoning_parser"]] if "reasoning_parser" in row else [])])


def read_row(row, tool_call_parser, reasoning_parser):
    """The message that is committed for a row's text, without call ids, and its flags."""
    read = read_turn_text(
        row["text"],
        reasoning_parser=reasoning_parser,
        tool_call_parser=tool_call_parser,
        tools=TOOLS,
        opened=row.get("prompt_opens_reasoning", False),
        chat_template_kwargs={},
    )
    calls = tuple(ToolCall(id="c", name=call.name, arguments=call.arguments) for call in read.calls)
    message = assistant_message(read.content, read.reasoning, calls).to_chat()
    if calls:
        message["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in calls]
    return message, list(read.flags)


JSON_CALL = '{"name": "look", "arguments": {"at": "x"}}'
FUNCTION = "<function=look>\n<parameter=at>\nx\n</parameter>\n</function>"
_SHARED = ["\n", " ", "{", "}", "[", "]", "(", ")", '"', "'", "\\", ",", ";", "<", ">", "look", "a", "é", "\ud800", "5"]
_JSON = [JSON_CALL, '{"name": "', '"arguments": ', '{"name":"fly","parameters":5}', "[1]", "null", "NaN", "1e999"]
FRAGMENTS = {
    "qwen25": [f"<tool_call>\n{JSON_CALL}\n</tool_call>", "<tool_call>", "</tool_call>", *_JSON],
    "hermes": [f"<tool_call>{JSON_CALL}</tool_call>", "<tool_call>", "</tool_call>", *_JSON],
    "qwen3_coder": [
        *(
            f"<tool_call>\n{FUNCTION}\n</tool_call>",
            FUNCTION,
            "<tool_call>",
            "</tool_call>",
            "<function=",
            "</function>",
        ),
        *("<function=look>", "<function=fly>", "<parameter=n>", "<parameter=deep>", "</parameter>", '{"x": 1}', "null"),
        *("<parameter=", "{'x': (1, 2)}", "-7"),
    ],
    "llama3": [
        *(
            "<|python_tag|>",
            f"<|python_tag|>{JSON_CALL}",
            '{"name":"look"}',
            "{'name': 'look', 'parameters': {1: None}}",
        ),
        *('{"a": 1}', *_JSON),
    ],
    "pythonic": [
        *(
            '[look(at="x")]',
            "[look(",
            "look()",
            'fly(n=-3, at=["x", None])',
            "at=",
            "<|python_start|>",
            "<|python_end|>",
        ),
        *('"""', "\\d", "f(x)", "[[", "r'", "True", "1e999", "lambda: 0"),
    ],
}
"""Pieces of markup by call format."""

MARKUP = {
    "qwen25": "",
    "hermes": "",
    "qwen3_coder": r"</?tool_call>",
    "llama3": r"<\|python_tag\|>|;",
    "pythonic": r"<\|python_(?:start|end)\|>|[\[\],]",
}
"""What may stand beside a call as its markup, as a regular expression; blanks go without saying."""


def texts(name):
    """Texts that look more or less like calls of a format."""
    return st.lists(st.sampled_from(FRAGMENTS[name] + _SHARED) | st.text(max_size=3), max_size=10).map("".join)


names = st.text("abXZ09_", min_size=1, max_size=6).map(lambda text: f"f{text}")
_scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
_strings = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["</tool_call>", "\n</tool_call>\n", "<|python_tag|>", ")]", "'\"", "\\n\\d", "; {", "<|python_end|>"]
)
_flat = _scalars | _strings
_nested = st.lists(_flat, max_size=2) | st.dictionaries(_strings, _flat, max_size=2)
arguments = st.dictionaries(names, _flat | _nested | st.lists(_nested, max_size=2), max_size=3)


def write_call(name, function, given):
    """A call as a model of that format writes it."""
    text = json.dumps({"name": function, "arguments": given}, ensure_ascii=False)
    if name == "qwen25":
        return f"<tool_call>\n{text}\n</tool_call>"
    if name == "hermes":
        return f"<tool_call>{text}</tool_call>"
    if name == "llama3":
        return f"<|python_tag|>{text}"
    if name == "pythonic":
        return f"[{function}({', '.join(f'{key}={value!r}' for key, value in given.items())})]"
    parameters = "".join(f"<parameter={key}>\n{_as_tag_value(value)}\n</parameter>\n" for key, value in given.items())
    return f"<tool_call>\n<function={function}>\n{parameters}</function>\n</tool_call>"


def _as_tag_value(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tool_for(function, given):
    """A tool whose schema has the types of the arguments."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    properties = {key: {"type": kinds.get(type(value), "object")} for key, value in given.items()}
    return {"type": "function", "function": {"name": function, "parameters": {"properties": properties}}}
