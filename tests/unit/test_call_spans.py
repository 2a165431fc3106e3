"""Where calls stand that a parser of others found: shown with a parser that, like SGLang's, tells only the calls."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.tokens.parsers.base import ParsedCall
from relax_trio.tokens.parsers.call_spans import place_calls

MARKS = ("<calls>", "</calls>", "<call>", "</call>", "<end>")


def tagged(text):
    """Calls are words between tags, inside a block; a block that isn't there hides them all."""
    if "<calls>" not in text:
        return ()
    return tuple(
        ParsedCall(name=name, arguments="{}", is_object=True) for name in re.findall(r"<call>(?:f:)?(\w+)</call>", text)
    )


def lenient(text):
    """JSON behind a tag; what is missing at its end is supplied."""
    found = re.search(r'<call>\{"name": "(\w+)"', text)
    return () if found is None else (ParsedCall(name=found[1], arguments="{}", is_object=True),)


def shown(pieces):
    return [(piece.kind, piece.text, [call.name for call in piece.calls]) for piece in pieces]


def content(pieces):
    return "".join(piece.text for piece in pieces if piece.kind in ("text", "unparsed"))


def test_marks_beside_calls_go_with_them_and_text_stays():
    pieces = place_calls("a <calls><call>f:one</call> b <call>two</call></calls> c", tagged, MARKS)
    assert shown(pieces) == [
        ("text", "a ", []),
        ("markup", "<calls>", []),
        ("call", "<call>f:one</call>", ["one"]),
        ("text", " b ", []),
        ("call", "<call>two</call>", ["two"]),
        ("markup", "</calls>", []),
        ("text", " c", []),
    ]


def test_a_malformed_call_stays_content_with_its_marks():
    pieces = place_calls("<calls><call>1 2</call><call>one</call></calls><call>3 4", tagged, MARKS)
    assert content(pieces) == "<call>1 2</call><call>3 4"
    assert [piece.text for piece in pieces if piece.kind == "unparsed"] == ["<call>", "<call>"]


def test_equal_calls_keep_the_text_between_them():
    pieces = place_calls("<calls><call>one</call> a <call>one</call> b <call>one</call></calls>", tagged, MARKS)
    assert [call.name for piece in pieces for call in piece.calls] == ["one"] * 3
    assert content(pieces) == " a  b "


def test_brackets_that_a_lenient_parser_supplies_belong_to_the_call():
    pieces = place_calls('a <call>{"name": "one"}<end> b', lenient, MARKS)
    assert content(pieces) == "a  b"
    (call,) = [piece for piece in pieces if piece.calls]
    assert json.loads(call.text.removeprefix("<call>")) == {"name": "one"}


def test_a_call_read_from_json_that_is_not_closed_was_cut_off():
    pieces = place_calls('a <call>{"name": "one", "argum', lenient, MARKS)
    assert shown(pieces) == [("unparsed", 'a <call>{"name": "one", "argum', [])]


@pytest.mark.parametrize(
    "text",
    [
        "<calls>" + "<call>1</call>" * 100,
        "<calls>" + "x".join(f"<call>n{index % 2}</call>" for index in range(60)),
    ],
)
def test_what_cannot_be_placed_keeps_its_markup_as_content(text):
    pieces = place_calls(text, tagged, MARKS)
    assert content(pieces) == text
    assert sum(len(piece.calls) for piece in pieces) == len(tagged(text))


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([*MARKS, "<call>one</call>", "<call>two</call>", "<call>f:one</call>", " ", "a b", "one"])
        | st.text(max_size=2),
        max_size=10,
    ).map(lambda parts: "".join(["<calls>", *parts, "<call>last</call>"]))
)
def test_pieces_are_the_text_and_their_calls_are_those_that_were_found(text):
    pieces = place_calls(text, tagged, MARKS)
    assert "".join(piece.text for piece in pieces) == text
    assert tuple(call for piece in pieces for call in piece.calls) == tagged(text)
    markup = "".join(piece.text for piece in pieces if piece.kind in ("markup", "call"))
    assert tagged(markup) == tagged(text) or content(pieces) == text
