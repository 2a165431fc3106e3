"""`session_output.json`: what it may hold, and what is said about one that breaks the contract."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_trio.agent.output import UnknownKeys, parse_session_output
from relax_trio.data.messages import Message
from relax_trio.data.record import SessionOutput
from relax_trio.errors import AgentOutputError
from relax_trio.ids import PlaceId

PLACE = PlaceId("G17/2")
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def parse(data):
    text = data if isinstance(data, str | bytes) else json.dumps(data)
    return parse_session_output(text.encode() if isinstance(text, str) else text, place=PLACE)


def record(**changes):
    return {"name": "main", "messages": MESSAGES, **changes}


def lines(*records):
    return "\n".join(json.dumps(r) for r in records) + "\n"


@pytest.mark.parametrize("data", ["", " \n\n", "\ufeff", {}, {"metadata": None, "reward": None}])
def test_nothing_said_is_an_implicit_export_without_reward(data):
    assert parse(data).output == SessionOutput(metadata={})


@pytest.mark.parametrize(
    ("reward", "parsed"), [(1, 1.0), (-0.5, -0.5), ({"score": 1, "len": 2}, {"score": 1, "len": 2})]
)
def test_an_object_without_messages_gives_metadata_and_reward(reward, parsed):
    output = parse({"metadata": {"ok": True}, "reward": reward}).output

    assert output == SessionOutput(metadata={"ok": True}, reward=parsed)


def test_one_object_with_messages_is_one_explicit_record_however_it_is_laid_out():
    for text in (json.dumps(record()), json.dumps(record(), indent=2), lines(record())):
        (parsed,) = parse(text).output.records
        assert parsed.name == "main"
        assert parsed.messages == (Message(role="user", content="hi"), Message(role="assistant", content="yes"))
        assert (parsed.tools, parsed.chat_template_kwargs, parsed.metadata, parsed.reward) == ((), {}, {}, None)


def test_json_lines_are_explicit_records_in_their_order():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    text = lines(
        record(reward=1), record(name="s\u2028", tools=[tool], chat_template_kwargs={"a": 1}, metadata={"b": 2})
    )

    first, second = parse(text.replace("\n", "\n\n")).output.records

    assert (first.name, first.reward) == ("main", 1.0)
    assert (second.name, second.tools, second.chat_template_kwargs) == ("s\u2028", (tool,), {"a": 1})
    assert second.metadata == {"b": 2}


def test_line_separators_inside_strings_do_not_end_a_record():
    text = json.dumps(record(name="a\u2028b"), ensure_ascii=False) + "\r\n" + json.dumps(record())

    assert [r.name for r in parse(text).output.records] == ["a\u2028b", "main"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff", "not UTF-8"),
        ("{", "not valid JSON"),
        ('{\n "reward": 1,\n}', "not valid JSON: .*line 3"),
        ('{"reward": NaN}', "not valid JSON: NaN is not a JSON number"),
        ("[]", "record 1: a JSON array is not accepted; write one object per line"),
        ([record()], "record 1: a JSON array is not accepted"),
        ("3", "record 1: must be a JSON object"),
        (lines(record(), [record()]), r"record 2 \(line 2\): a JSON array is not accepted"),
        (lines(record()) + "{oops\n", r"record 2 \(line 2\): not valid JSON"),
        (lines(record()) + '{"name": "b", "reward": Infinity}', r"record 2 \(line 2\): not valid JSON: Infinity"),
        (lines({"reward": 1}, record()), r"record 1 \(line 1\): has no messages"),
        (lines(record(), {"name": "b"}), r"record 2 \(line 2\) \('b'\): has no messages"),
        (lines(record(), record()), r"record 2 \(line 2\): the name 'main' is already taken"),
        ({"messages": MESSAGES}, "record 1: name must be a nonempty string"),
        (record(name=""), "record 1: name must be a nonempty string"),
        (record(name=3), "record 1: name must be a nonempty string"),
        (record(messages=[]), r"record 1 \('main'\): messages must hold at least one"),
        (record(messages=None), r"record 1 \('main'\): messages must be a list"),
        (record(messages=[*MESSAGES, {"role": "robot"}]), r"record 1 \('main'\): messages\[2\].role"),
        (record(tools={}), r"record 1 \('main'\): tools must be a list"),
        (record(chat_template_kwargs=[]), r"record 1 \('main'\): chat_template_kwargs must be"),
        (record(metadata=[]), r"record 1 \('main'\): metadata must be an object"),
        (record(reward=True), r"record 1 \('main'\): reward must be a number, an object or null, not true"),
        (record(reward="1"), r"record 1 \('main'\): reward must be a number"),
        ({"reward": False}, "the object: reward must be a number, an object or null, not false"),
        ({"reward": [1]}, r"the object: reward must be a number, an object or null, not \[1\]"),
        ('{"reward": 1e999}', "the object: reward must be a finite number"),
        (f'{{"reward": 1{"0" * 400}}}', "the object: reward must be a finite number"),
        ('{"reward": {"a": 1e999}}', "the object: reward holds a number that is not finite"),
        ('{"metadata": {"a": [-1e999]}}', "the object: metadata holds a number that is not finite"),
        ({"metadata": 1}, "the object: metadata must be an object"),
    ],
)
def test_broken_output_is_an_error_that_names_session_record_and_reason(data, said):
    with pytest.raises(AgentOutputError, match=rf"^session G17/2: session_output.json: {said}"):
        parse(data)


def test_unknown_keys_are_told_sorted_and_change_nothing():
    assert parse({"reward": 1, "z": 1, "name": "x"}).unknown_keys == ("name", "z")
    parsed = parse(lines(record(id=1), record(name="b", score=2, id=3)))
    assert parsed.unknown_keys == ("id", "score")
    assert len(parsed.output.records) == 2


def test_each_unknown_key_is_warned_about_once(events):
    keys = UnknownKeys()
    keys.warn(("a", "b"), PLACE)
    keys.warn(("b", "c"), PlaceId("G17/3"))

    assert [(e.name, e.fields) for e in events] == [
        ("output.unknown_key", {"place": "G17/2", "key": "a"}),
        ("output.unknown_key", {"place": "G17/2", "key": "b"}),
        ("output.unknown_key", {"place": "G17/3", "key": "c"}),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
SHAPED = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("name", "messages", "tools", "chat_template_kwargs", "metadata", "reward", "x"), JSON)
)


@given(st.binary() | st.text().map(str.encode) | st.lists(JSON | SHAPED, max_size=3).map(lines).map(str.encode))
def test_whatever_an_agent_writes_is_parsed_or_refused(data):
    try:
        said = repr(parse(data))
    except AgentOutputError as exc:
        said = str(exc)

    assert said.startswith(("ParsedOutput(", "session G17/2: session_output.json: "))
