"""Replies of the Responses dialect: items, the response object, the event sequence; and items sent back as input."""

from __future__ import annotations

import json

import pytest
from builders_api import make_completion, make_tool_message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_trio.api.dialect import reply_bytes
from relax_trio.api.responses import RESPONSES
from relax_trio.api.sealed import unseal
from relax_trio.data.messages import Message, ToolCall
from relax_trio.data.normalize import assistant_message, canonical_arguments
from relax_trio.data.request import TokenLogprob
from relax_trio.errors import ContextLengthExceeded, EngineUnavailable, InternalError, InvalidRequest, SessionDiscarded

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
FLAT = {"type": "function", "name": "calc", "parameters": {"type": "object", "properties": {}}}
NAMESPACED = [FLAT, {"type": "namespace", "name": "files", "tools": [{**FLAT, "name": n} for n in ("calc", "list")]}]
HI = Message(role="user", content="hi")
WHOLE = make_tool_message(content="let me see", reasoning_content="hm")
LOGPROBS = (
    TokenLogprob(token="é", token_id=5, logprob=-0.5),
    TokenLogprob(token="\ufffd", token_id=6, logprob=-1.0),
)


def parse(items="hi", **fields):
    return RESPONSES.parse({"input": items, **fields}, digest=b"\xab\xcd", retry=False)


def render(message=None, *, finish="stop", logprobs=None, **fields):
    return RESPONSES.render(make_completion(message, finish=finish, logprobs=logprobs), parse(**fields), name="G1-0-r3")


def events_of(frames):
    """The events of a stream; every frame names its event as its data does, and is numbered in turn."""
    events = []
    for frame in frames.split(b"\n\n")[:-1]:
        head, data = frame.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert head == b"event: " + event["type"].encode()
        assert event["sequence_number"] == len(events)
        events.append(event)
    return events


def stream(message=None, *, finish="stop", logprobs=None, **fields):
    completion = make_completion(message, finish=finish, logprobs=logprobs)
    return events_of(RESPONSES.sse_done(completion, parse(stream=True, **fields), name="G1-0-r3"))


# --- JSON ----------------------------------------------------------------------------------------------------------


def test_a_reply_has_the_shape_of_a_response():
    assert render(model="gpt", instructions="terse", max_output_tokens=9, metadata={"a": "b"}, temperature=0.3) == {
        "id": "resp_G1-0-r3",
        "object": "response",
        "created_at": 1_700_000_000,
        "completed_at": 1_700_000_000,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": "gpt",
        "max_output_tokens": 9,
        "output": [
            {
                "id": "msg_G1-0-r3",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Grüße", "annotations": [], "logprobs": []}],
            }
        ],
        "usage": {
            "input_tokens": 7,
            "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 10,
        },
        "background": False,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "top_p": None,
        "truncation": "disabled",
        "instructions": "terse",
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "user": None,
    }


def test_the_reply_repeats_what_was_asked_for_where_it_has_the_right_type():
    choice = {"type": "function", "name": "calc"}
    reply = render(
        tools=[FLAT], tool_choice=choice, parallel_tool_calls=False, text=3, metadata={"a": 1e999, "\ud800": 1}
    )

    assert (reply["tools"], reply["tool_choice"], reply["parallel_tool_calls"]) == ([FLAT], choice, False)
    assert reply["text"] == {"format": {"type": "text"}}
    assert reply["metadata"] == {"a": None, "\ufffd": 1}


def test_a_turn_is_reasoning_text_and_calls_in_this_order():
    reasoning, message, *calls = render(WHOLE, finish="tool_calls")["output"]

    assert (reasoning["id"], reasoning["type"], reasoning["status"]) == ("rs_G1-0-r3", "reasoning", "completed")
    assert reasoning["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert unseal(reasoning["encrypted_content"]) == "hm"
    assert "hm" not in reasoning["encrypted_content"]
    assert message["content"][0]["text"] == "let me see"
    assert calls == [
        {
            "id": "fc_G1-0-r3-0",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_1",
            "name": "calc",
            "arguments": '{"a":2}',
        },
        {
            "id": "fc_G1-0-r3-1",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_2",
            "name": "calc",
            "arguments": "3",
        },
    ]


def test_a_turn_that_the_limit_cut_is_incomplete():
    reply = render(Message(role="assistant", reasoning_content="hm"), finish="length")

    assert (reply["status"], reply["completed_at"]) == ("incomplete", None)
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [(each["type"], each["status"]) for each in reply["output"]] == [
        ("reasoning", "incomplete"),
        ("message", "incomplete"),
    ]
    thought, said = render(Message(role="assistant", content="a", reasoning_content="hm"), finish="length")["output"]
    assert (thought["status"], said["status"]) == ("completed", "incomplete")


def test_logprobs_stand_with_the_text():
    [message] = render(logprobs=LOGPROBS)["output"]

    assert message["content"][0]["logprobs"] == [
        {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": [], "token_id": 5},
        {"token": "\ufffd", "logprob": -1.0, "bytes": [], "top_logprobs": [], "token_id": 6},
    ]


# --- items sent back -----------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
CALLS = st.builds(
    lambda name, arguments, n: ToolCall(id=f"call_{n}", name=name, arguments=canonical_arguments(arguments)),
    st.sampled_from(["calc", "look", "list", "files__calc"]),
    st.sampled_from(['{"a": 1.0}', "{}", "3", "no json", "", "[1]"]) | TEXTS,
    st.integers(0, 9),
)
TURNS = st.builds(
    lambda content, reasoning, calls: assistant_message(content, reasoning, tuple(calls)),
    TEXTS,
    st.none() | TEXTS,
    st.lists(CALLS, max_size=3),
)
REASONING_KEYS = ("summary", "content", "encrypted_content")
KEPT = st.sets(st.sampled_from(REASONING_KEYS), min_size=1)


def as_kept(output, kept):
    """The items as a client sends them back that keeps only `kept` of reasoning."""
    empty = {"summary": [], "content": None, "encrypted_content": None}
    lost = {key: empty[key] for key in REASONING_KEYS if key not in kept}
    return [{**each, **lost} if each["type"] == "reasoning" else each for each in output]


@unhurried
@given(st.lists(st.tuples(TURNS, KEPT), min_size=1, max_size=4))
def test_turns_sent_back_are_the_messages_they_were(turns):
    items, expected = [{"role": "user", "content": "hi"}], [HI]
    for number, (turn, kept) in enumerate(turns):
        reply = RESPONSES.render(make_completion(turn), parse(list(items), tools=NAMESPACED), name=f"n{number}")
        output = json.loads(reply_bytes(reply))["output"]
        items += [*as_kept(output, kept), {"role": "user", "content": "hi"}]
        expected += [turn, HI]

    assert list(parse(items, tools=NAMESPACED).request.messages) == expected


@unhurried
@given(TURNS)
def test_a_turn_is_sent_back_the_same_but_for_its_reasoning_by_a_client_that_drops_it(turn):
    output = [each for each in render(turn)["output"] if each["type"] != "reasoning"]

    [message] = parse(output).request.messages
    assert message == assistant_message(turn.content or "", None, turn.tool_calls)


@unhurried
@given(st.lists(TURNS, min_size=2, max_size=4).filter(lambda turns: not any(turn.tool_calls for turn in turns)))
def test_turns_with_nothing_between_them_stay_apart(turns):
    items = [each for number, turn in enumerate(turns) for each in render(turn)["output"]]

    assert list(parse(items).request.messages) == turns


# --- events --------------------------------------------------------------------------------------------------------


def test_a_stream_tells_every_item_from_its_beginning_to_its_end():
    events = stream(WHOLE, finish="tool_calls")

    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


def test_the_last_event_is_the_reply_and_each_item_is_done_as_it_stands_there():
    events = stream(WHOLE, finish="tool_calls", tools=[FLAT])
    reply = render(WHOLE, finish="tool_calls", tools=[FLAT])

    assert events[-1]["response"] == reply
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == reply["output"]
    assert [event["output_index"] for event in done] == [0, 1, 2, 3]
    for event in events[:2]:
        response = event["response"]
        assert (response["id"], response["status"]) == (reply["id"], "in_progress")
        assert (response["output"], response["usage"], response["tools"]) == ([], None, [FLAT])


def test_deltas_add_up_to_the_items_that_were_begun():
    begun = {}
    for event in stream(WHOLE, finish="tool_calls", logprobs=LOGPROBS):
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            begun[event["output_index"]] = event["item"]
            assert event["item"]["status"] == "in_progress"
        elif kind == "reasoning_summary_part.added":
            begun[event["output_index"]]["summary"].append(event["part"])
        elif kind == "content_part.added":
            begun[event["output_index"]]["content"].append(event["part"])
        elif kind == "reasoning_summary_text.delta":
            begun[event["output_index"]]["summary"][event["summary_index"]]["text"] += event["delta"]
        elif kind == "reasoning_text.delta":
            begun[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "output_text.delta":
            part = begun[event["output_index"]]["content"][event["content_index"]]
            part["text"] += event["delta"]
            part["logprobs"] += event["logprobs"]
        elif kind == "function_call_arguments.delta":
            begun[event["output_index"]]["arguments"] += event["delta"]
        if "item_id" in event:
            assert event["item_id"] == begun[event["output_index"]]["id"]

    final = render(WHOLE, finish="tool_calls", logprobs=LOGPROBS)["output"]
    begun[0]["encrypted_content"] = final[0]["encrypted_content"]  # given only when the item is done
    assert [{**begun[index], "status": "completed"} for index in range(4)] == final


def test_a_turn_that_the_limit_cut_ends_with_incomplete():
    last = stream(finish="length")[-1]

    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_an_empty_text_has_no_delta():
    kinds = [event["type"] for event in stream(Message(role="assistant", content=""))]

    assert "response.output_text.delta" not in kinds
    assert "response.output_text.done" in kinds


def test_a_retry_that_joined_gets_the_same_bytes():
    completion = make_completion(WHOLE, finish="tool_calls")
    once, again = (RESPONSES.sse_done(completion, parse(stream=True), name="G1-0-r3") for _ in range(2))

    assert once == again


def test_connection_and_heartbeat_frames_are_comments():
    for frame in (RESPONSES.sse_open(parse()), RESPONSES.sse_heartbeat()):
        assert frame.startswith(b":")
        assert frame.endswith(b"\n\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InternalError("r1 failed"), "server_error"),
        (EngineUnavailable("stopping"), "server_error"),
        (ContextLengthExceeded(n_prompt=9, max_context_len=8), "context_length_exceeded"),
        (SessionDiscarded("ended"), "session_discarded"),
        (InvalidRequest("no", param="input"), "invalid_prompt"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_a_failed_stream_tells_the_error_both_ways(error, code):
    created, told, failed = events_of(RESPONSES.sse_failed(error, parse(model="gpt")))

    assert [event["type"] for event in (created, told, failed)] == ["response.created", "error", "response.failed"]
    assert told["error"] == RESPONSES.error(error)["error"]
    assert (told["message"], told["code"], told["param"]) == (error.message, error.code, error.param)
    response = failed["response"]
    assert (response["id"], response["status"], response["model"]) == ("resp_abcd", "failed", "gpt")
    assert (response["error"]["code"], response["error"]["message"]) == (code, error.message)
    assert created["response"] == {**response, "status": "in_progress", "error": None}
