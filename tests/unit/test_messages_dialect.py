"""The Messages dialect, requests: what is read, what is refused by which name, what is skipped."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from builders_messages import HI, assistant, parse, result, said, text, tool_use, user
from hypothesis import given
from hypothesis import strategies as st

from relax_trio.api.anthropic import MESSAGES
from relax_trio.data.messages import ImagePart, TextPart
from relax_trio.data.normalize import normalize_messages
from relax_trio.errors import InvalidRequest

CAPTURES = json.loads((Path(__file__).parents[1] / "data/wire/messages_requests.json").read_text())
SWITCH = frozenset({"messages", "enable_thinking"})
BILLING = "x-anthropic-billing-header: cc_version=2.1.4; cch=3f1a;"
PNG = {"type": "base64", "media_type": "image/png", "data": "AA=="}
LIMIT = 2**63


# --- requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda c: c["name"])
def test_requests_of_real_clients_are_accepted(capture):
    body = capture["body"]
    if capture["path"].endswith("count_tokens"):
        assert MESSAGES.parse_count(body).messages == (said("user", "hi"),)
        return

    parsed = MESSAGES.parse(body, digest=b"", retry=False)

    assert parsed.stream is bool(body.get("stream"))
    assert (parsed.request.model, parsed.request.max_tokens) == (body["model"], body["max_tokens"])
    assert [tool["function"]["name"] for tool in parsed.request.tools] == [
        tool["name"] for tool in body.get("tools", [])
    ]
    assert parsed.request.skipped == ()


def test_the_captures_hold_streams_images_and_a_count():
    assert sum('"image"' in json.dumps(c["body"]) for c in CAPTURES) == 1
    assert sum(bool(c["body"].get("stream")) for c in CAPTURES) == 6
    assert sum(c["path"].endswith("count_tokens") for c in CAPTURES) == 1


def test_a_request_that_sets_nothing_has_the_defaults():
    parsed = parse()

    assert not parsed.stream
    request = parsed.request
    assert (request.max_tokens, request.stop, request.seed, request.tools) == (64, (), None, ())
    assert (request.chat_template_kwargs, request.tool_choice, request.model) == ({}, "auto", "model")
    assert (request.digest, request.retry, request.skipped) == (b"d", False, ())


@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({"max_tokens": 5.0}, "max_tokens", 5),
        ({"stop_sequences": ["x", "y"]}, "stop", ("x", "y")),
        ({"stop_sequences": None}, "stop", ()),
        ({"seed": 3}, "seed", 3),
        ({"model": "claude"}, "model", "claude"),
        ({"n": 1}, "model", "model"),
        ({"tool_choice": None}, "tool_choice", "auto"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice", "auto"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "required"),
        ({"tool_choice": {"type": "none"}}, "tool_choice", "none"),
        ({"tool_choice": {"type": "tool", "name": "calc"}}, "tool_choice", "calc"),
        ({"chat_template_kwargs": {"lang": "de"}}, "chat_template_kwargs", {"lang": "de"}),
    ],
    ids=str,
)
def test_fields_that_mean_something_are_read(fields, attribute, value):
    assert getattr(parse(**fields).request, attribute) == value


def test_fields_that_mean_nothing_here_are_harmless():
    harmless = {
        "temperature": "hot",
        "top_p": None,
        "top_k": 5,
        "metadata": {"user_id": "u"},
        "betas": ["context-management-2025-06-27"],
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "service_tier": "auto",
        "container": 5,
        "mcp_servers": [],
        "cache_control": {"type": "ephemeral"},
        "store": True,
        "anything": [1],
    }

    assert parse(**harmless) == parse()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "64"}, "max_tokens"),
        ({"max_tokens": LIMIT}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"stream": 1}, "stream"),
        ({"model": 3}, "model"),
        ({"seed": LIMIT}, "seed"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": {}}, "stop_sequences"),
        ({"system": 3}, "system"),
        ({"system": [3]}, "system[0]"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"system": [{"type": "tool_use"}]}, "system[0]"),
        ({"system": [{"type": 3}]}, "system[0].type"),
        ({"thinking": "on"}, "thinking"),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": {"type": ["enabled"]}}, "thinking.type"),
        ({"output_config": "high"}, "output_config"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
        ({"tool_choice": {"type": []}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": {}}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"type": 3}]}, "tools[0].type"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": 3}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a", "description": 3}]}, "tools[0].description"),
        ({"tools": [{"name": "a", "strict": "yes"}]}, "tools[0].strict"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [*HI, {"role": "system", "content": ""}]}, "messages[1].content"),
        ({"messages": [*HI, {"role": "assistant", "content": None}]}, "messages[1].content"),
        ({"messages": [user(3)]}, "messages[0].content[0]"),
        ({"messages": [user({"type": "text", "text": None})]}, "messages[0].content[0].text"),
        ({"messages": [user({"text": 3})]}, "messages[0].content[0].text"),
        ({"messages": [user({})]}, "messages[0].content[0].type"),
        ({"messages": [user(text("hi"), tool_use({}))]}, "messages[0].content[1]"),
        ({"messages": [assistant(result(content="4"))]}, "messages[0].content[0]"),
        ({"messages": [assistant({"type": "image", "source": PNG})]}, "messages[0].content[0]"),
        ({"messages": [user({"type": "document"})]}, "messages"),
        ({"messages": [{"role": "system", "content": BILLING}], "system": "terse"}, "messages"),
        ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [user(result(content=3))]}, "messages[0].content[0].content"),
        ({"messages": [user(result(content=[text(3)]))]}, "messages[0].content[0].content[0].text"),
        ({"messages": [user(result(content=[result()]))]}, "messages[0].content[0].content[0]"),
        ({"messages": [assistant(tool_use({}, ""))]}, "messages[0].content[0].id"),
        ({"messages": [assistant({**tool_use({}), "name": None})]}, "messages[0].content[0].name"),
        ({"messages": [assistant(tool_use({"a": float("inf")}))]}, "messages[0].content[0].input"),
        ({"messages": [assistant(tool_use({"value": float("inf")}, "c_valuejson"))]}, "messages[0].content[0].input"),
        ({"messages": [assistant({"type": "thinking", "thinking": 3})]}, "messages[0].content[0].thinking"),
        ({"messages": [assistant({"type": "thinking", "signature": 3})]}, "messages[0].content[0].signature"),
        ({"messages": [assistant({"type": "redacted_thinking", "data": 3})]}, "messages[0].content[0].data"),
        ({"messages": [user({"type": "image"})]}, "messages[0].content[0].source"),
        ({"messages": [user({"type": "image", "source": {"type": "file"}})]}, "messages[0].content[0].source.type"),
        (
            {"messages": [user({"type": "image", "source": {"type": "url", "url": "x"}})]},
            "messages[0].content[0].source.url",
        ),
        (
            {"messages": [user({"type": "image", "source": {"type": "base64", "media_type": "image/png"}})]},
            "messages[0].content[0].source.data",
        ),
    ],
    ids=str,
)
def test_a_bad_field_is_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)

    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (
            user(text("look"), {"type": "image", "source": PNG}),
            (TextPart("look"), ImagePart("data:image/png;base64,AA==")),
        ),
        (
            user({"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}),
            (ImagePart("https://a/b.png"),),
        ),
        (user(result(content=[{"type": "image", "source": PNG}])), (ImagePart("data:image/png;base64,AA=="),)),
    ],
)
def test_an_image_stands_in_a_user_message_or_a_tool_result(block, content):
    assert parse([*HI, block], system="s").request.messages[-1].content == content


@pytest.mark.parametrize("body", [None, [], "x", 3])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        MESSAGES.parse(body, digest=b"", retry=False)


# --- any body ----------------------------------------------------------------------------------------------------

junk = st.sampled_from([None, True, 3, 1.5, float("inf"), "", "x", "\ud800", [], [None], {}, {"type": "text"}])


def places(value, path=()):
    """Paths of everything inside `value`."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*path, key)
        yield from places(item, (*path, key))


@given(st.data())
def test_a_mutated_body_is_read_into_canonical_messages_or_refused_by_a_field_it_has(data):
    body = copy.deepcopy(data.draw(st.sampled_from(CAPTURES))["body"])
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(places(body)) or [()]))
        if not path:
            break
        at = body
        for key in path[:-1]:
            at = at[key]
        if data.draw(st.booleans()):
            at[path[-1]] = copy.deepcopy(data.draw(junk))
        else:
            del at[path[-1]]
    try:
        request = MESSAGES.parse(body, digest=b"", retry=False, template_variables=SWITCH).request
    except InvalidRequest as exc:
        refusal = exc
    else:
        assert normalize_messages([message.to_chat() for message in request.messages]) == request.messages
        assert json.dumps([message.to_chat() for message in request.messages], ensure_ascii=False).encode()
        return

    assert refusal.param in refusal.message
    for step in re.findall(r"\w+", refusal.param)[:-1]:
        body = body[int(step) if step.isdigit() else step]
