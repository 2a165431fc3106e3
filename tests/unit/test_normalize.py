"""Normalization of Chat-shaped input: what becomes equal, what is refused and under which path."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.data.messages import ImagePart, Message, TextPart, ToolCall
from relax_trio.data.normalize import (
    canonical_arguments,
    normalize_messages,
    normalize_template_kwargs,
    normalize_tools,
)
from relax_trio.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}


def call(arguments, **extra):
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, **extra}


def one(raw):
    return normalize_messages([USER, raw])[1]


def test_developer_is_system_and_leading_system_messages_merge_with_a_blank_line():
    messages = normalize_messages(
        [
            {"role": "developer", "content": "a"},
            {"role": "system", "content": "b"},
            USER,
            {"role": "system", "content": "c"},
        ]
    )
    assert messages == (
        Message(role="system", content="a\n\nb"),
        Message(role="user", content="hi"),
        Message(role="system", content="c"),
    )


def test_text_parts_collapse_and_cache_control_and_unknown_keys_vanish():
    raw = {
        "role": "user",
        "name": "bob",
        "content": [
            {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "b"},
            {"text": "c"},
        ],
        "cache_control": {},
    }
    assert normalize_messages([raw]) == (Message(role="user", content="abc"),)


@pytest.mark.parametrize("image", ["data:image/png;base64,AA", {"url": "data:image/png;base64,AA", "detail": "low"}])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_images_stay_parts_in_user_and_tool_messages(image, role):
    raw = {"role": role, "content": [{"type": "image_url", "image_url": image}, {"type": "text", "text": "what?"}]}
    assert one(raw).content == (ImagePart("data:image/png;base64,AA"), TextPart("what?"))


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_an_empty_tool_result_is_the_empty_string(content):
    assert one({"role": "tool", "tool_call_id": "c1", "content": content}) == Message(
        role="tool", content="", tool_call_id="c1"
    )
    assert one({"role": "tool", "tool_call_id": "c1"}).content == ""


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_assistant_text_may_be_missing_beside_calls_or_reasoning(content):
    with_calls = one({"role": "assistant", "tool_calls": [call("{}")], **content})
    assert with_calls == Message(role="assistant", tool_calls=(ToolCall(id="c1", name="f", arguments="{}"),))
    assert one({"role": "assistant", "reasoning_content": "r", **content}) == Message(
        role="assistant", reasoning_content="r"
    )


def test_nulls_of_model_dump_change_nothing():
    dumped = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "reasoning_content": None,
        "reasoning": "",
    }
    assert one(dumped) == Message(role="assistant", content="x")


def test_reasoning_is_an_alias_of_reasoning_content():
    assert one({"role": "assistant", "content": "x", "reasoning": "r"}) == one(
        {"role": "assistant", "content": "x", "reasoning_content": "r"}
    )


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ('{"b": 1, "a": 2}', '{"a":2,"b":1}'),
        ({"b": 1.0, "a": [2.5, True]}, '{"a":[2.5,true],"b":1}'),
        ('{"a": 3.0}', '{"a":3}'),
        ('{"a": "é"}', '{"a":"é"}'),
        ("[1, 2]", "[1, 2]"),
        ("7.0", "7.0"),
        (7.0, "7"),
        ("{broken", "{broken"),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": 1e999}', '{"a": 1e999}'),
        ("", ""),
        ("[" * 100_000, "[" * 100_000),
        (None, "{}"),
    ],
)
def test_arguments_have_one_text(written, canonical):
    message = one({"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": written}}]})
    assert message.tool_calls == (ToolCall(id="c1", name="f", arguments=canonical),)


def test_lone_surrogates_are_replaced_wherever_text_comes_in():
    assert one({"role": "user", "content": "a\ud83d"}).content == "a\ufffd"
    assert canonical_arguments('{"a": "\\ud83d"}') == '{"a":"\ufffd"}'
    tool = {"type": "function", "function": {"name": "f", "description": "\udc00"}}
    assert normalize_tools([tool])[0]["function"] == {"name": "f", "description": "\ufffd"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(), json_values, max_size=4), st.sampled_from([None, 1, 4]), st.booleans())
def test_rewriting_arguments_as_json_clients_do_changes_nothing(value, indent, as_text):
    first = canonical_arguments(value)
    rewritten = json.dumps(json.loads(first), indent=indent, ensure_ascii=as_text)
    assert canonical_arguments(rewritten) == first
    assert canonical_arguments(first) == first


@settings(deadline=None)
@given(st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=6))
def test_normalizing_what_was_normalized_is_the_identity(roles):
    raw = [{"role": role, "content": f"{role} text", "tool_call_id": "c" if role == "tool" else None} for role in roles]
    once = normalize_messages(raw)
    assert normalize_messages([message.to_chat() for message in once]) == once


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("no object", "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "function", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": ""}, "messages[1].content"),
        ({"role": "system", "content": []}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [5]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "audio"}]}, "messages[1].content[0].type"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "x.png"}]},
            "messages[1].content[0].image_url",
        ),
        ({"role": "assistant", "content": [{"type": "image_url", "image_url": "data:,"}]}, "messages[1].content[0]"),
        ({"role": "assistant"}, "messages[1].content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[1].content"),
        ({"role": "assistant", "content": "x", "reasoning_content": 1}, "messages[1].reasoning_content"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [call("{}", id=None)]}, "messages[1].tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [call("{}", type="custom")]}, "messages[1].tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "messages[1].tool_calls[0].function"),
        ({"role": "tool", "content": "x", "tool_call_id": 3}, "messages[1].tool_call_id"),
    ],
)
def test_a_malformed_message_is_refused_under_its_path(message, param):
    with pytest.raises(InvalidRequest) as caught:
        normalize_messages([USER, message])
    assert caught.value.param == param
    assert param in caught.value.message
    assert caught.value.status == 400


@pytest.mark.parametrize("raw", [None, {}, [], "x"])
def test_messages_must_be_a_nonempty_list(raw):
    with pytest.raises(InvalidRequest) as caught:
        normalize_messages(raw, param="messages")
    assert caught.value.param == "messages"


def test_tools_keep_the_clients_key_order_and_lose_nulls_and_cache_control():
    raw = {
        "function": {"parameters": {"z": 1, "a": 2}, "name": "f", "description": None, "strict": False, "x": 1},
        "type": "function",
        "cache_control": {"type": "ephemeral"},
    }
    (tool,) = normalize_tools([raw])
    assert json.dumps(tool) == (
        '{"function": {"parameters": {"z": 1, "a": 2}, "name": "f", "strict": false}, "type": "function"}'
    )
    assert normalize_tools([{"function": {"name": "f"}}]) == ({"type": "function", "function": {"name": "f"}},)
    assert normalize_tools(None) == normalize_tools([]) == ()


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (3, "tools[0]"),
        ({"type": "web_search"}, "tools[0].type"),
        ({"type": "function", "name": "f", "parameters": {}}, "tools[0].function"),
        ({"type": "function", "function": {}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "f", "description": 3}}, "tools[0].function.description"),
        ({"type": "function", "function": {"name": "f", "parameters": []}}, "tools[0].function.parameters"),
        ({"type": "function", "function": {"name": "f", "strict": "yes"}}, "tools[0].function.strict"),
        ({"type": "function", "function": {"name": "f", "parameters": {"x": float("inf")}}}, "tools[0].function"),
    ],
)
def test_a_malformed_tool_is_refused_under_its_path(tool, param):
    with pytest.raises(InvalidRequest) as caught:
        normalize_tools([tool])
    assert caught.value.param == param


@pytest.mark.parametrize("key", ["add_generation_prompt", "tokenize", "tools", "messages", "sanitize_control_tokens"])
def test_template_arguments_of_the_server_are_refused(key):
    with pytest.raises(InvalidRequest) as caught:
        normalize_template_kwargs({"enable_thinking": False, key: True})
    assert caught.value.param == f"chat_template_kwargs.{key}"


def test_template_arguments_pass_and_null_is_none():
    assert normalize_template_kwargs({"enable_thinking": False}) == {"enable_thinking": False}
    assert normalize_template_kwargs(None) == {}
    with pytest.raises(InvalidRequest):
        normalize_template_kwargs([])


@pytest.mark.parametrize("part", [{"type": "file"}, {"type": "input_audio"}])
def test_where_nobody_is_told_a_part_or_tool_that_is_not_served_is_refused(part):
    """Of a dataset, nothing may vanish in silence."""
    with pytest.raises(InvalidRequest, match=r"content\[0\]\.type must be text or image_url"):
        normalize_messages([{"role": "user", "content": [part, {"type": "text", "text": "x"}]}])
    with pytest.raises(InvalidRequest, match=r"tools\[0\]\.type must be function"):
        normalize_tools([part])
