"""Requests of the Responses dialect: what is read, what is refused. Replies: test_responses_reply.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders_api import TOOL, make_completion
from builders_forest import commit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_trio.api.dialect import reply_bytes
from relax_trio.api.responses import RESPONSES
from relax_trio.api.sealed import seal
from relax_trio.data.messages import ImagePart, Message, ToolCall
from relax_trio.errors import InvalidRequest, ProtocolError, UnsupportedFeature
from relax_trio.forest.forest import SessionForest

CAPTURES = json.loads((Path(__file__).parents[1] / "data/wire/responses_requests.json").read_text())
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
FLAT = {"type": "function", "name": "calc", "parameters": {"type": "object", "properties": {}}}
HI = Message(role="user", content="hi")
CALL = {"type": "function_call", "call_id": "c1", "name": "calc", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "4"}
CANONICAL_CALL = ToolCall(id="c1", name="calc", arguments='{"a":1}')
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}
THINKING = frozenset({"messages", "enable_thinking"})


def parse(items="hi", *, template_variables=frozenset(), **fields):
    return RESPONSES.parse({"input": items, **fields}, digest=b"d", retry=False, template_variables=template_variables)


def messages(items, **fields):
    return list(parse(items, **fields).request.messages)


def said(text, **fields):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **fields}


def thought(text, key="summary"):
    if key == "encrypted_content":
        return {"type": "reasoning", "summary": [], "encrypted_content": seal(text), "content": None}
    kind = {"summary": "summary_text", "content": "reasoning_text"}[key]
    return {"type": "reasoning", "summary": [], key: [{"type": kind, "text": text}]}


def refused(items="hi", **fields):
    with pytest.raises(InvalidRequest) as caught:
        parse(items, **fields)
    assert caught.value.status == 400
    return caught.value


# --- requests of real clients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda c: c["name"])
def test_requests_of_real_clients_are_accepted(capture):
    body = capture["body"]
    if "previous_response_id" in body:
        assert refused(body["input"], **body).param == "previous_response_id"
        return

    parsed = RESPONSES.parse(body, digest=b"", retry=False)

    assert parsed.stream is bool(body.get("stream"))
    assert parsed.request.model == body["model"]
    assert [tool["function"]["name"] for tool in parsed.request.tools] == [t["name"] for t in body.get("tools", [])]
    if "instructions" in body:
        assert parsed.request.messages[0] == Message(role="system", content=body["instructions"])
    if isinstance(body["input"], list) and body["input"][-1].get("type") == "function_call_output":
        assert parsed.request.messages[-2].tool_calls[0].arguments == '{"a":2,"b":2}'
        assert parsed.request.messages[-1].tool_call_id == parsed.request.messages[-2].tool_calls[0].id


def test_a_request_in_the_manner_of_codex_is_read():
    parsed = parse(
        [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "more"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {**thought("hm", "encrypted_content"), "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
            {**said("let me see"), "id": "msg_1", "phase": "commentary"},
            {**CALL, "id": "fc_1", "name": "list", "namespace": "files"},
            RESULT,
        ],
        instructions="base",
        stream=True,
        store=False,
        include=["reasoning.encrypted_content"],
        parallel_tool_calls=False,
        prompt_cache_key="k",
        reasoning=None,
        tool_choice="auto",
        tools=[
            FLAT,
            {"type": "namespace", "name": "files", "description": "", "tools": [{**FLAT, "name": "list"}]},
            {"type": "web_search", "external_web_access": False},
        ],
    )

    assert parsed.request.messages == (
        Message(role="system", content="base\n\nrules\n\nmore"),
        HI,
        Message(
            role="assistant",
            content="let me see",
            reasoning_content="hm",
            tool_calls=(ToolCall(id="c1", name="list", arguments='{"a":1}'),),
        ),
        Message(role="tool", content="4", tool_call_id="c1"),
    )
    assert [tool["function"]["name"] for tool in parsed.request.tools] == ["calc", "list"]
    assert parsed.request.skipped == ("tool web_search",)


# --- input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"role": "user", "content": "a"}, Message(role="user", content="a")),
        ({"type": "message", "role": "system", "content": "a"}, Message(role="system", content="a")),
        ({"role": "developer", "content": [{"type": "input_text", "text": "a"}]}, Message(role="system", content="a")),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            Message(role="user", content="ab"),
        ),
        (said("a", id="msg_1", status="completed"), Message(role="assistant", content="a")),
        ({"role": "assistant", "content": "a"}, Message(role="assistant", content="a")),
        ({"role": "assistant", "content": ""}, Message(role="assistant", content="")),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            Message(role="assistant", content="no"),
        ),
        ({**CALL, "id": "fc_1", "status": "completed"}, Message(role="assistant", tool_calls=(CANONICAL_CALL,))),
        (thought("hm"), Message(role="assistant", reasoning_content="hm")),
        (RESULT, Message(role="tool", content="4", tool_call_id="c1")),
        (
            {**RESULT, "output": [{"type": "input_text", "text": "4"}]},
            Message(role="tool", content="4", tool_call_id="c1"),
        ),
        ({**RESULT, "output": ""}, Message(role="tool", content="", tool_call_id="c1")),
        ({**RESULT, "output": None}, Message(role="tool", content="", tool_call_id="c1")),
        ({**RESULT, "output": []}, Message(role="tool", content="", tool_call_id="c1")),
    ],
    ids=str,
)
def test_every_item_has_its_message(item, message):
    assert messages([{"role": "user", "content": "hi"}, item]) == [HI, message]


def test_a_string_is_one_user_message_behind_the_instructions():
    assert messages("hi") == [HI]
    assert messages("hi", instructions="terse") == [Message(role="system", content="terse"), HI]
    assert messages("hi", instructions="") == [HI]


def test_a_system_message_in_the_middle_keeps_its_place():
    items = [{"role": "user", "content": "hi"}, {"role": "developer", "content": "now terse"}]

    assert messages(items, instructions="base")[1:] == [HI, Message(role="system", content="now terse")]


def test_the_items_of_one_turn_are_one_message_and_two_turns_stay_two():
    second = ToolCall(id="c2", name="calc", arguments="{}")
    items = [
        *(thought("hm"), said("a"), CALL, {**CALL, "call_id": "c2", "arguments": None}),
        *(RESULT, {**RESULT, "call_id": "c2"}),
        *(thought("so"), said("b")),
        *(said("c"), thought("so so"), said("d")),
    ]

    assert messages(items) == [
        Message(role="assistant", content="a", reasoning_content="hm", tool_calls=(CANONICAL_CALL, second)),
        Message(role="tool", content="4", tool_call_id="c1"),
        Message(role="tool", content="4", tool_call_id="c2"),
        Message(role="assistant", content="b", reasoning_content="so"),
        Message(role="assistant", content="c"),
        Message(role="assistant", content="d", reasoning_content="so so"),
    ]


def test_whatever_follows_a_call_belongs_to_its_turn_until_the_result():
    items = [thought("hm"), CALL, thought("so"), {**CALL, "call_id": "c2"}, said("a"), said("b"), RESULT]

    [turn, result] = messages(items)

    assert (turn.content, turn.reasoning_content, len(turn.tool_calls)) == ("a\n\nb", "hm\n\nso", 2)
    assert result.role == "tool"


@pytest.mark.parametrize("key", ["summary", "content", "encrypted_content"])
def test_any_part_of_a_reasoning_item_restores_the_reasoning(key):
    assert messages([thought("hm\n", key), said("a")]) == [
        Message(role="assistant", content="a", reasoning_content="hm\n")
    ]


def test_the_seal_is_exact_where_readable_texts_were_touched():
    for key in ("summary", "content"):
        item = {**thought("short", key), "encrypted_content": seal("the whole of it")}
        assert messages([item])[0].reasoning_content == "the whole of it"


@pytest.mark.parametrize("sealed", ["gAAAAABo…", "", seal("x")[:-4], seal("x") + "AAAA", "=", "\ud800"], ids=ascii)
def test_the_seal_of_another_server_is_no_reasoning(sealed):
    foreign = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed}

    assert messages([foreign, said("a")]) == [Message(role="assistant", content="a")]
    assert messages([{**foreign, "summary": [{"type": "summary_text", "text": "hm"}]}])[0].reasoning_content == "hm"


def test_a_reasoning_item_with_an_id_alone_finds_its_turn_by_what_else_was_said():
    forest = SessionForest()
    first = parse("hi").request
    reply = commit(
        forest, forest.match(first.messages, (), {}), Message(role="assistant", content="a", reasoning_content="hm")
    )
    items = [{"role": "user", "content": "hi"}, {"type": "reasoning", "id": "rs_1", "summary": []}, said("a")]

    second = parse([*items, {"role": "user", "content": "and?"}]).request

    match = forest.match(second.messages, (), {})
    assert match.parent is reply
    assert [message.content for message in match.new_messages] == ["and?"]


def test_a_lone_reasoning_item_without_text_says_nothing():
    assert messages([{"type": "reasoning", "id": "rs_1", "summary": []}, {"role": "user", "content": "hi"}]) == [HI]


def test_what_nothing_here_serves_is_left_out_and_named_once():
    items = [
        {"role": "user", "content": "hi"},
        {"type": "item_reference", "id": "rs_1"},
        {"id": "rs_1"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "x" * 1000},
    ]
    tools = [{"type": "web_search"}, FLAT, {"type": "custom", "name": "patch"}, {"type": "web_search"}]

    parsed = parse(items, tools=tools)

    assert parsed.request.messages == (HI,)
    assert parsed.request.skipped == ("tool web_search", "tool custom", "web_search_call", "x" * 64)


# --- tools ---------------------------------------------------------------------------------------------------------


def test_a_flat_tool_is_the_nested_one_of_chat_with_keys_in_its_order():
    flat = {"strict": True, "parameters": {}, "type": "function", "description": None, "name": "f", "x": 1}

    [tool] = parse(tools=[flat]).request.tools

    assert json.dumps(tool) == json.dumps(
        {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
    )
    assert parse(tools=[TOOL]).request.tools == parse(tools=[FLAT]).request.tools == (TOOL,)


def test_functions_of_namespaces_go_by_their_name_and_come_back_with_their_namespace():
    search = {**FLAT, "name": "search"}
    tools = [
        {
            "type": "namespace",
            "name": "web",
            "tools": [search, {**FLAT, "name": "fetch"}, {"type": "custom", "name": "x"}],
        },
        {"type": "namespace", "name": "mcp__docs__", "tools": [search]},
        {**FLAT, "name": "fetch"},
    ]
    parsed = parse(tools=tools)
    names = [tool["function"]["name"] for tool in parsed.request.tools]

    assert names == ["search", "web__fetch", "mcp__docs__search", "fetch"]
    assert parsed.request.skipped == ("tool custom",)
    calls = tuple(ToolCall(id=f"c{i}", name=name, arguments="{}") for i, name in enumerate([*names, "unknown"]))
    completion = make_completion(Message(role="assistant", tool_calls=calls), finish="tool_calls")
    items = RESPONSES.render(completion, parsed, name="n")["output"]
    assert [(item.get("namespace"), item["name"]) for item in items] == [
        ("web", "search"),
        ("web", "fetch"),
        ("mcp__docs__", "search"),
        (None, "fetch"),
        (None, "unknown"),
    ]
    assert messages(items, tools=tools) == [completion.message]


# --- fields --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({"max_output_tokens": 64.0}, "max_tokens", 64),
        ({"model": "\ud800x"}, "model", "\ufffdx"),
        ({"stop": ["x"]}, "stop", ("x",)),
        ({"seed": 3}, "seed", 3),
        ({"top_logprobs": 2}, "logprobs", True),
        ({"include": ["message.output_text.logprobs"]}, "logprobs", True),
        ({"include": ["reasoning.encrypted_content", 3]}, "logprobs", False),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", {"x": 1}),
        ({"tool_choice": None}, "tool_choice", "auto"),
        ({"tool_choice": "required"}, "tool_choice", "required"),
        ({"tool_choice": {"type": "function", "name": "calc"}}, "tool_choice", "calc"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}}, "tool_choice", "required"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice", "auto"),
        ({"background": False, "previous_response_id": None, "conversation": None}, "stop", ()),
    ],
    ids=str,
)
def test_fields_that_mean_something_are_read(fields, attribute, value):
    assert getattr(parse(**fields).request, attribute) == value


@pytest.mark.parametrize(("effort", "wish"), [("none", False), ("minimal", False), ("low", True), ("xhigh", True)])
def test_an_effort_is_a_template_argument_only_where_the_template_has_it(effort, wish):
    reasoning = {"effort": effort, "summary": "auto"}
    own = {"enable_thinking": "mine"}

    assert parse(reasoning=reasoning).request.chat_template_kwargs == {}
    assert parse(reasoning=reasoning, template_variables=THINKING).request.chat_template_kwargs == {
        "enable_thinking": wish
    }
    asked = parse(reasoning=reasoning, chat_template_kwargs=own, template_variables=THINKING)
    assert asked.request.chat_template_kwargs == own


@pytest.mark.parametrize("reasoning", [None, {}, {"effort": None}, {"summary": "auto"}], ids=str)
def test_no_effort_is_no_template_argument(reasoning):
    assert parse(reasoning=reasoning, template_variables=THINKING).request.chat_template_kwargs == {}


def item(**fields):
    return [{"role": "user", "content": "hi"}, fields]


@pytest.mark.parametrize(
    ("items", "fields", "param"),
    [
        (None, {}, "input"),
        ([], {"instructions": "x"}, "input"),
        ("", {}, "input"),
        ({"role": "user"}, {}, "input"),
        ([{"type": "item_reference", "id": "rs_1"}], {}, "input"),
        (item(type="item_reference", id="msg_1"), {}, "input[1]"),
        (item(id="fc_1"), {}, "input[1]"),
        (item(type="item_reference"), {}, "input[1]"),
        (item(type="item_reference", id=3), {}, "input[1].id"),
        (["hi"], {}, "input[0]"),
        (item(), {}, "input[1].type"),
        (item(type=3), {}, "input[1].type"),
        (item(role="tool", content="x"), {}, "input[1].role"),
        (item(role="user", content=None), {}, "input[1].content"),
        (item(role="user", content=[]), {}, "input[1].content"),
        (item(role="user", content=3), {}, "input[1].content"),
        (item(role="user", content=[None]), {}, "input[1].content[0]"),
        (item(role="user", content=[{"type": "input_text"}]), {}, "input[1].content[0].text"),
        (item(role="user", content=[{"type": "input_file", "file_id": "f"}]), {}, "input[1].content[0].type"),
        (item(role="user", content=[{"type": "input_image", "file_id": "f"}]), {}, "input[1].content[0].image_url"),
        (item(role="system", content=[IMAGE]), {}, "input[1].content[0]"),
        (item(role="assistant", content=None), {}, "input[1].content"),
        (item(type="function_call", name="f", arguments="{}"), {}, "input[1].call_id"),
        (item(type="function_call", call_id="c", arguments="{}"), {}, "input[1].name"),
        (item(type="function_call", call_id="c", name="f", arguments=1e999), {}, "input[1].arguments"),
        (item(type="function_call_output", output="4"), {}, "input[1].call_id"),
        (item(type="function_call_output", call_id="c", output=4), {}, "input[1].output"),
        (item(type="reasoning", summary=[{"text": 3}]), {}, "input[1].summary[0]"),
        (item(type="reasoning", encrypted_content=3), {}, "input[1].encrypted_content"),
        ("hi", {"instructions": ["x"]}, "instructions"),
        ("hi", {"max_output_tokens": 0}, "max_output_tokens"),
        ("hi", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("hi", {"conversation": "conv_1"}, "conversation"),
        ("hi", {"prompt": {"id": "pmpt_1"}}, "prompt"),
        ("hi", {"background": True}, "background"),
        ("hi", {"n": 2}, "n"),
        ("hi", {"stream": "yes"}, "stream"),
        ("hi", {"include": "x"}, "include"),
        ("hi", {"top_logprobs": -1}, "top_logprobs"),
        ("hi", {"reasoning": "high"}, "reasoning"),
        ("hi", {"reasoning": {"effort": 3}}, "reasoning.effort"),
        ("hi", {"tool_choice": "sometimes"}, "tool_choice"),
        ("hi", {"tool_choice": 3}, "tool_choice"),
        ("hi", {"tool_choice": {"name": "f"}}, "tool_choice.type"),
        ("hi", {"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ("hi", {"tool_choice": {"type": "allowed_tools", "mode": []}}, "tool_choice.mode"),
        ("hi", {"tools": {}}, "tools"),
        ("hi", {"tools": ["f"]}, "tools[0]"),
        ("hi", {"tools": [{"type": "function"}]}, "tools[0].name"),
        ("hi", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ("hi", {"tools": [{**FLAT, "parameters": "x"}]}, "tools[0].parameters"),
        ("hi", {"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ("hi", {"tools": [{"type": "namespace", "name": "n", "tools": [{}]}]}, "tools[0].tools[0].name"),
    ],
    ids=str,
)
def test_a_bad_field_is_refused_by_name(items, fields, param):
    error = refused(items, **fields)

    assert error.param == param
    assert param.partition("[")[0].partition(".")[0] in error.message


def test_what_is_stored_elsewhere_is_refused_with_what_to_do():
    error = refused(previous_response_id="resp_1")

    assert isinstance(error, UnsupportedFeature)
    assert "send the complete input" in error.message


def test_an_image_stands_in_a_user_message_or_a_tool_result():
    for items in (item(role="user", content=[IMAGE]), item(type="function_call_output", call_id="c", output=[IMAGE])):
        assert messages(items)[-1].content == (ImagePart("data:image/png;base64,AA=="),)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    *("input", "instructions", "tools", "tool_choice", "max_output_tokens", "reasoning", "include", "stream", "model"),
    *("metadata", "text", "user", "parallel_tool_calls", "store", "temperature"),
]


@unhurried
@given(st.sampled_from(FIELDS), JSON_VALUES)
def test_no_value_of_a_field_makes_anything_but_a_reply_or_a_refusal(name, value):
    refusal = None
    try:
        parsed = RESPONSES.parse({"input": "hi", name: value}, digest=b"d", retry=False)
        reply_bytes(RESPONSES.render(make_completion(), parsed, name="n"))
    except ProtocolError as exc:
        refusal = exc

    assert refusal is None or (refusal.status == 400 and refusal.param is not None)
