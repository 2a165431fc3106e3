"""The Chat dialect: what is read, what is refused, what is rendered; and the pure parts around it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders_api import HI, TOOL, make_completion, make_tool_message
from hypothesis import given
from hypothesis import strategies as st

from relax_trio.api.body import MAX_DEPTH, parse_body
from relax_trio.api.chat import CHAT
from relax_trio.api.envelopes import anthropic_error, error_envelope, openai_error
from relax_trio.data.messages import ImagePart, Message, TextPart
from relax_trio.data.normalize import normalize_messages
from relax_trio.data.request import TokenLogprob
from relax_trio.errors import (
    AuthenticationError,
    ContextLengthExceeded,
    EngineUnavailable,
    InternalError,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    ProtocolError,
    UnsupportedFeature,
)

CAPTURES = json.loads((Path(__file__).parents[1] / "data/wire/chat_requests.json").read_text())
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
LIMIT = 2**63


def parse(**fields):
    return CHAT.parse({"messages": HI, **fields}, digest=b"d", retry=False)


def render(completion, **fields):
    return CHAT.render(completion, parse(**fields), name="G1-0-r3")


# --- requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda c: c["name"])
def test_requests_of_real_clients_are_accepted(capture):
    body = capture["body"]

    parsed = CHAT.parse(body, digest=b"", retry=False)

    assert parsed.stream is bool(body.get("stream"))
    assert parsed.request.model == body["model"]
    assert parsed.request.messages[-1].role == body["messages"][-1]["role"]
    assert [tool["function"]["name"] for tool in parsed.request.tools] == [
        tool["function"]["name"] for tool in body.get("tools", [])
    ]


def test_the_captures_hold_both_an_image_and_streams():
    assert sum("image_url" in json.dumps(c["body"]) for c in CAPTURES) == 1
    assert sum(bool(c["body"].get("stream")) for c in CAPTURES) > 5


def test_a_request_that_sets_nothing_has_the_defaults():
    parsed = parse()

    assert not parsed.stream
    request = parsed.request
    assert (request.max_tokens, request.stop, request.seed, request.logprobs) == (None, (), None, False)
    assert (request.tools, request.chat_template_kwargs, request.tool_choice) == ((), {}, "auto")
    assert request.digest == b"d"


@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({"max_completion_tokens": 5, "max_tokens": 9}, "max_tokens", 5),
        ({"max_completion_tokens": None, "max_tokens": 9}, "max_tokens", 9),
        ({"max_tokens": 64.0}, "max_tokens", 64),
        ({"stop": "x"}, "stop", ("x",)),
        ({"stop": ["x", "y"]}, "stop", ("x", "y")),
        ({"stop": []}, "stop", ()),
        ({"stop": None}, "stop", ()),
        ({"stop": "\ud800"}, "stop", ("\ufffd",)),
        ({"seed": -LIMIT}, "seed", -LIMIT),
        ({"seed": LIMIT - 1}, "seed", LIMIT - 1),
        ({"logprobs": True, "top_logprobs": 3}, "logprobs", True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", {"enable_thinking": False}),
        ({"model": "\ud800x"}, "model", "\ufffdx"),
        ({"n": 1}, "model", "model"),
        ({"tool_choice": "required"}, "tool_choice", "required"),
        ({"tool_choice": "any"}, "tool_choice", "required"),
        ({"tool_choice": None}, "tool_choice", "auto"),
        ({"tool_choice": {"type": "function", "function": {"name": "calc"}}}, "tool_choice", "calc"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required"}}}, "tool_choice", "required"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice", "auto"),
    ],
    ids=str,
)
def test_fields_that_mean_something_are_read(fields, attribute, value):
    assert getattr(parse(**fields).request, attribute) == value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"n": "1"}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": float("inf")}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x", ""]}, "stop[1]"),
        ({"seed": LIMIT}, "seed"),
        ({"seed": -LIMIT - 1}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"logprobs": 3}, "logprobs"),
        ({"model": 3}, "model"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tools": "calc"}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": 3}]}, "tools[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": 3}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal"}]}]}, "messages[0].content[0].refusal"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ],
    ids=str,
)
def test_a_bad_field_is_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)

    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.split("[")[0] in caught.value.message


def test_more_than_one_choice_is_refused_with_what_to_do():
    with pytest.raises(UnsupportedFeature, match="send the request 3 times"):
        parse(n=3)


@pytest.mark.parametrize("image", [IMAGE, {"type": "image_url", "image_url": "data:image/png;base64,AA=="}])
def test_an_image_stands_among_the_texts_of_a_user_message_or_a_tool_result(image):
    content = [{"type": "text", "text": "look"}, image, {"type": "text", "text": "well"}]
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [image]},
    ]

    first, _, last = parse(messages=messages).request.messages

    shown = ImagePart("data:image/png;base64,AA==")
    assert first.content == (TextPart("look"), shown, TextPart("well"))
    assert last.content == (shown,)


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_an_image_is_refused_where_no_model_sees_one(role):
    with pytest.raises(InvalidRequest, match="cannot hold images") as caught:
        parse(messages=[*HI, {"role": role, "content": [IMAGE]}])

    assert caught.value.param == "messages[1].content[0]"


def test_what_has_no_meaning_here_is_ignored_whatever_its_type():
    parse(temperature="hot", top_p=[], store=1, metadata=3, stream_options=4, response_format="x", unknown={"a": None})


@pytest.mark.parametrize("body", [None, [], "x", 3, True], ids=str)
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        CHAT.parse(body, digest=b"", retry=False)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    *("messages", "model", "n", "stop", "seed", "stream", "logprobs"),
    *("tools", "tool_choice", "max_tokens", "chat_template_kwargs"),
]


@given(st.sampled_from(FIELDS), JSON_VALUES)
def test_no_value_of_a_field_makes_anything_but_a_request_or_a_refusal(name, value):
    refusal = None
    try:
        parse(**{name: value})
    except ProtocolError as exc:
        refusal = exc

    assert refusal is None or (refusal.status == 400 and refusal.param is not None)


# --- replies -----------------------------------------------------------------------------------------------------


def test_a_reply_has_the_shape_of_a_chat_completion():
    assert render(make_completion(), model="gpt") == {
        "id": "chatcmpl-G1-0-r3",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "gpt",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Grüße", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 5},
        },
    }


def test_tool_calls_come_with_null_content_and_their_arguments_as_text():
    out = render(make_completion(make_tool_message(reasoning_content="hm"), finish="tool_calls"))

    choice = out["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "calc", "arguments": '{"a":2}'}},
            {"id": "call_2", "type": "function", "function": {"name": "calc", "arguments": "3"}},
        ],
        "refusal": None,
    }


@pytest.mark.parametrize(
    "message",
    [
        Message(role="assistant", content=""),
        Message(role="assistant", content="a\u2028b\nc"),
        Message(role="assistant", reasoning_content="hm"),
        Message(role="assistant", content="4", reasoning_content="hm"),
        make_tool_message(),
        make_tool_message(content="let me see", reasoning_content="hm"),
    ],
    ids=str,
)
def test_a_rendered_message_sent_back_is_the_same_message(message):
    rendered = render(make_completion(message))["choices"][0]["message"]

    assert normalize_messages([*HI, rendered])[1] == message


def test_a_message_cut_in_its_reasoning_can_be_sent_back_without_it():
    rendered = render(make_completion(Message(role="assistant", reasoning_content="hm")))["choices"][0]["message"]
    del rendered["reasoning_content"]

    assert normalize_messages([*HI, rendered])[1] == Message(role="assistant", content="")


def test_logprobs_are_given_per_token():
    entries = (
        TokenLogprob(token="é", token_id=5, logprob=-0.5),
        TokenLogprob(token="\ufffd", token_id=6, logprob=-1.0),
    )
    out = render(make_completion(logprobs=entries), logprobs=True)

    assert out["choices"][0]["logprobs"] == {
        "content": [
            {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": [], "token_id": 5},
            {"token": "\ufffd", "logprob": -1.0, "bytes": None, "top_logprobs": [], "token_id": 6},
        ],
        "refusal": None,
    }


def test_the_stream_ends_with_one_complete_chunk_and_the_end_mark():
    completion = make_completion(make_tool_message(content="a\nb\r\u2028c"), finish="tool_calls")

    data, done, rest = CHAT.sse_done(completion, parse(stream=True, tools=[TOOL]), name="n").split(b"\n\n")

    assert (done, rest) == (b"data: [DONE]", b"")
    assert data.count(b"\n") == data.count(b"\r") == 0
    chunk = json.loads(data.removeprefix(b"data: "))
    assert chunk["object"] == "chat.completion.chunk"
    assert chunk["usage"]["completion_tokens"] == 3
    [choice] = chunk["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["delta"]["role"] == "assistant"
    assert choice["delta"]["content"] == "a\nb\r\u2028c"
    assert [call["index"] for call in choice["delta"]["tool_calls"]] == [0, 1]


def test_connection_and_heartbeat_frames_are_comments():
    for frame in (CHAT.sse_open(parse()), CHAT.sse_heartbeat()):
        assert frame.startswith(b":")
        assert frame.endswith(b"\n\n")


def test_a_failed_stream_ends_with_error_data_and_the_end_mark():
    data, done, rest = CHAT.sse_failed(ContextLengthExceeded(n_prompt=9, max_context_len=8), parse()).split(b"\n\n")

    error = json.loads(data.removeprefix(b"data: "))["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 8 tokens. However, ")
    assert (done, rest) == (b"data: [DONE]", b"")


# --- envelopes, bodies -------------------------------------------------------------------------------------------


def test_an_openai_envelope_has_all_four_fields():
    assert openai_error(InvalidRequest("no", param="n")) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": None}
    }


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("x"), "invalid_request_error"),
        (AuthenticationError("x"), "authentication_error"),
        (NotFound("x"), "not_found_error"),
        (PayloadTooLarge("x"), "request_too_large"),
        (InternalError("x"), "api_error"),
        (EngineUnavailable("x"), "overloaded_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_an_anthropic_envelope_names_the_kind(error, kind):
    assert anthropic_error(error) == {"type": "error", "error": {"type": kind, "message": "x"}}


@pytest.mark.parametrize(
    ("path", "is_anthropic"),
    [
        ("/agentic_api/v1/messages", True),
        ("/agentic_api/messages/count_tokens", True),
        ("/agentic_api/v1/chat/completions", False),
        ("/agentic_api/v1/messages2", False),
        ("", False),
    ],
)
def test_the_path_chooses_the_envelope(path, is_anthropic):
    assert ("type" in error_envelope(path, NotFound("x"))) is is_anthropic


@pytest.mark.parametrize("pair", ["[]", '{"a":}'], ids=["lists", "objects"])
def test_nesting_is_bounded(pair):
    def nested(depth):
        return (pair[:-1] * (depth - 1) + ("[]" if pair == "[]" else "{}") + pair[-1] * (depth - 1)).encode()

    assert parse_body(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 50_000):
        with pytest.raises(InvalidRequest, match="nested"):
            parse_body(nested(depth))


# --- what nothing here serves --------------------------------------------------------------------------------------


def test_what_nothing_serves_is_skipped_and_named_once():
    file, audio = {"type": "file", "file": {"file_id": "f"}}, {"type": "input_audio", "input_audio": {"data": ""}}
    messages = [
        {"role": "system", "content": [audio]},
        {"role": "user", "content": [file, {"type": "text", "text": "a"}, audio, {"type": "input_text", "text": "b"}]},
        {"role": "user", "content": [file]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}, {"type": "\ud800" + "x" * 99}]},
        {"role": "tool", "tool_call_id": "c", "content": [file]},
    ]
    request = parse(messages=messages, tools=[{"type": "web_search"}, TOOL, {"type": "custom", "custom": {}}]).request

    assert [(m.role, m.content) for m in request.messages] == [("user", "ab"), ("assistant", "no"), ("tool", "")]
    assert request.tools == (TOOL,)
    assert request.skipped == ("input_audio", "file", "\ufffd" + "x" * 63, "tool web_search", "tool custom")


def test_a_request_of_nothing_else_is_refused_and_told_what_was_left_out():
    with pytest.raises(InvalidRequest, match=r"messages must hold at least one message \(left out: file\)"):
        parse(messages=[{"role": "user", "content": [{"type": "file"}]}])


def test_an_image_stays_where_other_parts_are_skipped():
    parsed = parse(messages=[{"role": "user", "content": [{"type": "file"}, IMAGE]}])

    assert parsed.request.skipped == ("file",)
    assert parsed.request.messages[0].content == (ImagePart("data:image/png;base64,AA=="),)
