"""The Messages dialect, replies: what is rendered, and that what comes back is what was given."""

from __future__ import annotations

import copy
import json
import re

import pytest
from builders_api import make_completion
from builders_messages import HI, assistant, call_of, parse, read, result, text, tool_use, user
from hypothesis import given
from hypothesis import strategies as st

from relax_trio.api.anthropic import MESSAGES
from relax_trio.api.sealed import seal, unseal
from relax_trio.data.json import canonical_json
from relax_trio.data.messages import Message, ToolCall
from relax_trio.data.normalize import assistant_message, canonical_arguments, clean_text
from relax_trio.errors import ContextLengthExceeded, InternalError

# --- replies -----------------------------------------------------------------------------------------------------


def render(completion, **fields):
    return MESSAGES.render(completion, parse(**fields), name="G1-0-r3")


def test_a_text_reply_has_every_field():
    assert render(make_completion(), model="claude") == {
        "id": "msg_G1-0-r3",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [{"type": "text", "text": "Grüße"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 5,
            "output_tokens": 3,
        },
    }


def test_blocks_come_in_the_order_thinking_text_calls():
    call = ToolCall(id="call_1", name="calc", arguments='{"a":2}')
    message = Message(role="assistant", content="so", reasoning_content="hm", tool_calls=(call,))

    assert render(make_completion(message, finish="tool_calls"))["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": seal("hm")},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "call_1", "name": "calc", "input": {"a": 2}},
    ]


@pytest.mark.parametrize(
    ("message", "kinds"),
    [
        (Message(role="assistant", content=""), ["text"]),
        (Message(role="assistant", reasoning_content="hm"), ["thinking", "text"]),
        (call_of("{}"), ["tool_use"]),
    ],
)
def test_a_reply_without_calls_has_a_text(message, kinds):
    assert [block["type"] for block in render(make_completion(message))["content"]] == kinds


@pytest.mark.parametrize(
    ("finish", "stop_string", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("stop", "the run's own", ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", "END", ("tool_use", None)),
    ],
)
def test_the_stop_reason_is_anthropics(finish, stop_string, expected):
    reply = render(make_completion(finish=finish, stop_sequence=stop_string), stop_sequences=["X", "END"])

    assert (reply["stop_reason"], reply["stop_sequence"]) == expected


def events(data):
    """(event name, data) of each frame; the two name the same."""
    frames = [frame for frame in data.decode().split("\n\n") if frame]
    pairs = [re.fullmatch(r"event: (\S+)\ndata: (.*)", frame).groups() for frame in frames]
    assert all(json.loads(text)["type"] == name for name, text in pairs)
    return [json.loads(text) for _, text in pairs]


def test_a_stream_is_the_reply_in_events():
    call = ToolCall(id="call_1", name="calc", arguments='{"a":2}')
    message = Message(role="assistant", content="so\n\nso", reasoning_content="hm", tool_calls=(call,))
    completion = make_completion(message, finish="tool_calls")
    seen = events(MESSAGES.sse_done(completion, parse(), name="G1-0-r3"))

    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thinking = [block[0], block[1], block[1], block[2]]
    assert [e["type"] for e in seen] == ["message_start", *thinking, *block, *block, "message_delta", "message_stop"]
    assert seen[0]["message"] == {
        **render(completion),
        "content": [],
        "stop_reason": None,
        "usage": {**render(completion)["usage"], "output_tokens": 0},
    }
    deltas = [e["delta"] for e in seen if e["type"] == "content_block_delta"]
    assert deltas == [
        {"type": "thinking_delta", "thinking": "hm"},
        {"type": "signature_delta", "signature": seal("hm")},
        {"type": "text_delta", "text": "so\n\nso"},
        {"type": "input_json_delta", "partial_json": '{"a":2}'},
    ]
    starts = [e["content_block"] for e in seen if e["type"] == "content_block_start"]
    assert starts == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_1", "name": "calc", "input": {}},
    ]
    assert [e["index"] for e in seen if "index" in e] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert seen[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert seen[-2]["usage"] == render(completion)["usage"]


def test_pings_open_a_stream_and_keep_it_alive():
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    assert MESSAGES.sse_open(parse()) == ping
    assert MESSAGES.sse_heartbeat() == ping


def test_a_failed_stream_ends_with_an_error_event():
    assert events(MESSAGES.sse_failed(InternalError("no"), parse())) == [
        {"type": "error", "error": {"type": "api_error", "message": "no"}}
    ]


def test_a_full_context_has_anthropics_wording():
    error = MESSAGES.error(ContextLengthExceeded(n_prompt=99, max_context_len=64))

    assert error == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "prompt is too long: 99 tokens > 64 maximum"},
    }


# --- there and back ----------------------------------------------------------------------------------------------


def sent_back(message, drop=()):
    """What a client sends back for `message`, having kept all but the `drop`ped parts of its thinking."""
    blocks = copy.deepcopy(render(make_completion(message))["content"])
    for block in blocks:
        if block["type"] == "thinking":
            block.update(dict.fromkeys(drop, ""))
    results = [result(block["id"], content="4") for block in blocks if block["type"] == "tool_use"]
    return read(*HI, assistant(*blocks), user(*results, text("go on")))


texts = st.text(max_size=20).map(clean_text)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.one_of(
    json_values.map(canonical_json).map(canonical_arguments),
    st.dictionaries(st.just("value"), json_values, min_size=1).map(canonical_json),
    texts.map(canonical_arguments),
    st.sampled_from(["", "3", "3.0", " 3 ", '"x"', '{"value":3}', '{"value":"{}"}', '{"a":1e999}', "{", "NaN", "[1]"]),
)


@st.composite
def completions(draw):
    """Canonical assistant messages, call ids as the codec makes them."""
    given_arguments = draw(st.lists(arguments, max_size=3))
    calls = tuple(
        ToolCall(id=f"call_{index:024x}", name="calc", arguments=given) for index, given in enumerate(given_arguments)
    )
    return assistant_message(draw(texts), draw(st.none() | texts), calls)


@given(completions(), st.sampled_from([(), ("thinking",), ("signature",)]))
def test_a_reply_that_is_sent_back_is_the_message_that_was_given(message, dropped):
    back = sent_back(message, dropped)

    assert back[1] == message
    assert [m.tool_call_id for m in back[2:-1]] == [call.id for call in message.tool_calls]


@given(completions())
def test_events_put_together_are_the_reply(message):
    completion = make_completion(message)
    blocks = []
    for event in events(MESSAGES.sse_done(completion, parse(), name="G1-0-r3")):
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        for key, value in event.get("delta", {}).items() if event["type"] == "content_block_delta" else ():
            if key == "partial_json":
                blocks[-1]["input"] = json.loads(value)
            elif key != "type":
                blocks[-1][key] += value

    assert blocks == render(completion)["content"]


@pytest.mark.parametrize(
    ("given", "shown", "mark"),
    [
        ('{"a":2}', {"a": 2}, ""),
        ('{"value":3}', {"value": 3}, ""),
        ("3", {"value": 3}, "_valuejson"),
        ("null", {"value": None}, "_valuejson"),
        ('"x"', {"value": "x"}, "_valuejson"),
        ("[1,2]", {"value": [1, 2]}, "_valuejson"),
        ("3.0", {"value": "3.0"}, "_valuetext"),
        ("x", {"value": "x"}, "_valuetext"),
        ("{", {"value": "{"}, "_valuetext"),
        ('{"a":1e999}', {"value": '{"a":1e999}'}, "_valuetext"),
    ],
)
def test_arguments_that_are_no_object_are_shown_under_value(given, shown, mark):
    (block,) = render(make_completion(call_of(given)))["content"]

    assert (block["input"], block["id"]) == (shown, f"call_1{mark}")


def test_an_id_that_only_looks_marked_stays_as_it_is():
    given = {"a": 1, "value": 2}
    messages = read(*HI, assistant(tool_use(given, "t_valuejson")), user(result("t_valuejson"), result("u_valuejson")))

    assert messages[1].tool_calls[0].id == "t_valuejson"
    assert [m.tool_call_id for m in messages[2:]] == ["t_valuejson", "u_valuejson"]


def test_redacted_thinking_of_our_own_is_read():
    assert read(*HI, assistant({"type": "redacted_thinking", "data": seal("hm")}))[1].reasoning_content == "hm"


@given(st.text().map(clean_text))
def test_a_seal_carries_its_text(said):
    assert unseal(seal(said)) == said
    assert re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", seal(said))


@pytest.mark.parametrize("foreign", ["", "c2ln", "é", seal("hm")[:-4], seal("hm") + "AAAA", "cmVsYXgx", "cmVsYXgx!"])
def test_what_another_has_sealed_or_is_damaged_is_no_text(foreign):
    assert unseal(foreign) is None
