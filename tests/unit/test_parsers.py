"""What holds for every parser of this package: no text is lost, a call that is written is read, nothing raises."""

from __future__ import annotations

import re

import pytest
from builders_parsers import (
    FORMATS,
    FRAGMENTS,
    FUNCTION,
    JSON_CALL,
    MARKUP,
    TOOLS,
    arguments,
    names,
    texts,
    tool_for,
    write_call,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.data.json import canonical_json
from relax_trio.tokens.parsers.base import split_calls
from relax_trio.tokens.parsers.python_literal import literal
from relax_trio.tokens.parsers.registry import REASONING_PARSERS, TOOL_CALL_PARSERS
from relax_trio.tokens.parsers.schema import parameter_schemas, typed_value

LONG = 8000


def calls_of(split):
    return [(call.name, call.arguments) for call in split.calls]


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None)
@given(data=st.data())
def test_no_text_is_lost(name, data):
    text = data.draw(texts(name))
    parser = TOOL_CALL_PARSERS[name]
    pieces = parser.pieces(text, TOOLS)
    assert "".join(piece.text for piece in pieces) == text
    kept = "".join(piece.text for piece in pieces if piece.kind in ("text", "unparsed"))
    split = split_calls(parser, text, TOOLS)
    assert split.content == (kept.strip() if split.calls else text)
    for piece in pieces:
        assert bool(piece.calls) == (piece.kind == "call")
        if piece.kind == "markup":
            assert re.fullmatch(rf"(?:{MARKUP[name]}|\s)*", piece.text), piece
        if piece.kind == "call":
            alone = split_calls(parser, parser.alone(piece.text, str), TOOLS)
            assert alone.calls == piece.calls
            assert alone.content == ""


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None)
@given(data=st.data())
def test_a_call_that_is_written_is_read(name, data):
    function, given_arguments = data.draw(names), data.draw(arguments)
    before, after = data.draw(st.sampled_from(["", "a ", "Look:\n"])), data.draw(st.sampled_from(["", " b", "\nDone."]))
    if name == "qwen3_coder":  # its notation has no way to write the text "null" in any case, nor tags alone in a value
        given_arguments = {key: value for key, value in given_arguments.items() if str(value).lower() != "null"}
    text = before + write_call(name, function, given_arguments) + after
    split = split_calls(TOOL_CALL_PARSERS[name], text, [tool_for(function, given_arguments)])
    assert calls_of(split) == [(function, canonical_json(given_arguments))]
    assert split.content == (before + after).strip()
    assert split.n_unparsed == 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "unit", ["[", "(", "{", '"', "<tool_call>", "\\", "-", "f(", "[f(x=", '{"name":"', "<function=f>"]
)
def test_a_text_that_goes_round_in_circles_is_read(name, unit):
    """Time that grows exponentially, or with the square of a long text, would let this test run for minutes."""
    parser = TOOL_CALL_PARSERS[name]
    for prefix in ("", *FRAGMENTS[name][:3]):
        text = prefix + unit * (LONG // len(unit))
        assert "".join(piece.text for piece in parser.pieces(text, TOOLS)) == text


@pytest.mark.parametrize("name", FORMATS)
def test_many_calls_are_read(name):
    one = write_call(name, "look", {"at": "x"})
    split = split_calls(TOOL_CALL_PARSERS[name], "\n".join([one] * 300), TOOLS)
    assert calls_of(split) == [("look", '{"at":"x"}')] * 300
    assert split.content == ""


@pytest.mark.parametrize("name", REASONING_PARSERS)
@settings(deadline=None)
@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a"]) | st.text(max_size=3), max_size=6).map(
        "".join
    ),
    opened=st.booleans(),
)
def test_no_reasoning_is_lost(name, text, opened):
    split = REASONING_PARSERS[name].split(text, opened=opened, chat_template_kwargs={})
    tags = re.escape("<think>") + "|" + re.escape("</think>")
    kept = [re.sub(rf"{tags}|\s", "", part) for part in (split.reasoning or "", split.content)]
    assert "".join(kept) == re.sub(rf"{tags}|\s", "", text)
    if split.reasoning is None and not opened and name == "qwen3" and not text.lstrip().startswith("<think>"):
        assert split.content == text


# --- JSON between tags -----------------------------------------------------------------------------------------


def call(body):
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize(
    "body",
    [
        '{"arguments": {}}',
        '{"name": ""}',
        '{"name": 5}',
        "[1]",
        "[]",
        f"[{JSON_CALL}, 1]",
        '{"name": "look", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        JSON_CALL + JSON_CALL,
        "[" * 100_000,
    ],
)
def test_what_is_no_call_stays_text(body):
    for name in ("qwen25", "hermes"):
        split = split_calls(TOOL_CALL_PARSERS[name], call(body), TOOLS)
        assert (split.content, split.calls, split.n_unparsed) == (call(body), (), 1)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "look"}', "{}"),
        ('{"name": "look", "parameters": {"b": 1, "a": 2.0}}', '{"a":2,"b":1}'),
        ('{"name": "look", "arguments": {"a": 1}, "parameters": {}}', '{"a":1}'),
        ('{"name": "look", "arguments": {"a": 1}, "parameters": {"b": 1}}', '{"b":1}'),
        ('{"name": "look", "arguments": "\\ud800"}', '"\ufffd"'),
        ('{"name": "look", "arguments": [1.0]}', "[1]"),
    ],
)
def test_arguments_are_what_the_model_wrote_in_canonical_form(body, arguments):
    assert calls_of(split_calls(TOOL_CALL_PARSERS["qwen25"], call(body), TOOLS)) == [("look", arguments)]


# --- values by schema ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "NULL", None),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "5.0", "5.0"),
        ({"type": "integer"}, "1" * 5000, "1" * 5000),
        ({"type": "number"}, "5", 5.0),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "many", "many"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", False),
        ({"type": "object"}, '{"a": true}', {"a": True}),
        ({"type": "object"}, "{'a': (1, -2), 3: None}", {"a": [1, -2], "3": None}),
        ({"type": "object"}, "{a}", "{a}"),
        ({"type": "array"}, "[NaN]", "[NaN]"),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"type": ["null", "integer"]}, "5", 5),
        ({"type": ["null"]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "array"}]}, "5", 5),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": [1, "2"]}, "2", "2"),
        ({"enum": []}, "2", "2"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
        ({"properties": {}}, '{"a": 1}', {"a": 1}),
        ({"items": {}}, "[1]", [1]),
        ({"type": "any"}, "true", "true"),
        ({"type": "any"}, "+1", 1),
        ({}, "5", "5"),
        (True, "5", "5"),
        ({"type": "int32"}, "5", 5),
        ({"type": "float"}, "0.5", 0.5),
    ],
)
def test_a_schema_types_what_is_written_as_text(schema, text, value):
    found = typed_value(text, {"a": schema}, "a")
    assert found == value
    assert type(found) is type(value)


def test_schemas_of_parameters_are_found_where_tools_put_them():
    def tool(parameters):
        return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]

    assert parameter_schemas(tool({"properties": {"a": {}}}), "f") == {"a": {}}
    assert parameter_schemas(tool({"anyOf": [{"properties": {"a": 1}}, {"properties": {"a": 2, "b": 3}}]}), "f") == {
        "a": 1,
        "b": 3,
    }
    assert parameter_schemas(tool({"a": {"type": "integer"}}), "f") == {"a": {"type": "integer"}}
    assert parameter_schemas(tool({"properties": {}}), "f") == {}
    assert parameter_schemas([{"type": "function", "function": {"name": "f"}}], "f") == {}
    assert parameter_schemas(tool({}), "g") == {}


# --- tags, Python, Llama ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\nSure:\n{FUNCTION}\n</tool_call>", "Sure:", [("look", '{"at":"x"}')]),
        (FUNCTION, FUNCTION, []),
        ("<tool_call><function=f></function></tool_call>", "", [("f", "{}")]),
        ("<tool_call><function=f><parameter=a>1<parameter=b>2</function>", "", [("f", '{"a":"1","b":"2"}')]),
        ("<tool_call><function=f>x<parameter=a>1</parameter></function>", None, []),
        ("<tool_call><function=f><parameter=a>1</parameter> x</function>", None, []),
        ("<tool_call><function=></function></tool_call>", None, []),
        (f"<tool_call>{FUNCTION}<function=g><parameter=a>1", "<function=g><parameter=a>1", [("look", '{"at":"x"}')]),
        (
            f"<tool_call>\n<function=f>\n<parameter=a>\n1\n<tool_call>\n{FUNCTION}\n</tool_call>",
            "<tool_call>\n<function=f>\n<parameter=a>\n1",
            [("look", '{"at":"x"}')],
        ),
        (f"<tool_call>{FUNCTION} Done. <tool_call>{FUNCTION}", "Done.", [("look", '{"at":"x"}')] * 2),
    ],
)
def test_calls_written_as_tags(text, content, calls):
    split = split_calls(TOOL_CALL_PARSERS["qwen3_coder"], text, TOOLS)
    assert split.content == (text if content is None else content)
    assert calls_of(split) == calls


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'a\\d\\n'", "a\\d\n"),
        ("r'a\\d'", "a\\d"),
        ('"""a\n"b\\w"""', 'a\n"b\\w'),
        ("'\\101\\x41'", "AA"),
        ("'a' 'b'", "ab"),
        ("-1.5", -1.5),
        ("{True: 1, None: 2, 1.5: 3}", {"true": 1, "null": 2, "1.5": 3}),
    ],
)
def test_a_literal_in_pythons_notation(text, value):
    assert literal(text) == value


@pytest.mark.parametrize(
    "text", ["", "x", "f()", "1 + 1", "{1}", "b''", "f'{x}'", "...", "1j", "1e999", "{(): 1}", "{**x}", "'"]
)
def test_what_is_no_literal_is_refused_and_not_evaluated(text):
    with pytest.raises(ValueError, match=r".+"):
        literal(text)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("[f(**x)]", None, []),
        ("[f.g(x=1)]", None, []),
        ("[f(x=1), 5]", "5", [("f", '{"x":1}')]),
        ("[f(x=1),]", "", [("f", '{"x":1}')]),
        ("[f()] and [g()]", "and", [("f", "{}"), ("g", "{}")]),
        ("[f(x=1]) [g()]", "[f(x=1])", [("g", "{}")]),
        ("[f(x=1) for f in g]", None, []),
    ],
)
def test_calls_in_pythons_notation(text, content, calls):
    split = split_calls(TOOL_CALL_PARSERS["pythonic"], text, TOOLS)
    assert split.content == (text if content is None else content)
    assert calls_of(split) == calls


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "look"}', "", [("look", "{}")]),
        ('{"name": "Ada"}', None, []),
        ('{"name": "Ada", "parameters": {}}', "", [("Ada", "{}")]),
        (' {"name": "look"}', None, []),
        ('<|python_tag|>{"name": "Ada"}\n{"name": "Bob"};', "", [("Ada", "{}"), ("Bob", "{}")]),
        ('{"name": "look"} or {"name":"look"}', "or", [("look", "{}")] * 2),
        ('{"a": 1} <|python_tag|>{"name": "f"}', '{"a": 1}', [("f", "{}")]),
        ('<|python_tag|>{"name": "f"}<|python_tag|>x', "<|python_tag|>x", [("f", "{}")]),
    ],
)
def test_calls_of_llama_3(text, content, calls):
    split = split_calls(TOOL_CALL_PARSERS["llama3"], text, TOOLS)
    assert split.content == (text if content is None else content)
    assert calls_of(split) == calls
