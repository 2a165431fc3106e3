"""Every refusal on all three APIs with a real Session: status, envelope, the field's name, nothing in the forest."""

from __future__ import annotations

import json

import pytest
from builders_served import body_of, open_served, status_of

CHAT, RESPONSES, MESSAGES = PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
HI = [{"role": "user", "content": "hi"}]
GOOD = {CHAT: {"messages": HI}, RESPONSES: {"input": HI}, MESSAGES: {"messages": HI, "max_tokens": 9}}


def error_of(path, reply):
    """The error in the envelope of `path`."""
    value = json.loads(body_of(reply))
    if path == MESSAGES:
        assert (set(value), value["type"]) == ({"type", "error"}, "error")
        assert set(value["error"]) == {"type", "message"}
    else:
        assert set(value) == {"error"}
        assert set(value["error"]) == {"message", "type", "param", "code"}
    return value["error"]


async def refusal(served, path, body, status):
    """The error of a request that is refused with `status` and leaves no trace."""
    before = served.nodes
    reply = await served.ask(path, body)
    assert status_of(reply) == status
    assert b"x-should-retry: false" in reply
    assert served.nodes == before
    assert served.n_generated == 0
    return error_of(path, reply)


async def read_error(path, body, status, **config):
    async with open_served(["x"], **config) as served:
        return await refusal(served, path, body, status)


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_is_no_json_object_is_400(loopback_clock, events, path):
    bodies = {
        b"": "not valid JSON",
        b'{"messages": [': "not valid JSON",
        b'{"temperature": NaN}': "NaN is not a JSON number",
        b'{"temperature": -Infinity}': "-Infinity is not a JSON number",
        b'{"model": "\xff"}': "not UTF-8",
        b'{"model": "\xed\xa0\x80"}': "not UTF-8",
        b"[" * 100_000: "nested too deeply",
        b'{"tools": ' + b"[" * 300 + b"]" * 300 + b"}": "nested deeper than 200 levels",
        b"[]": "must be a JSON object, not a list",
        b'"hi"': "must be a JSON object, not a string",
    }
    async with open_served(["x"]) as served:
        for body, says in bodies.items():
            error = await refusal(served, path, body, 400)
            assert says in error["message"]
            assert error["type"] == "invalid_request_error"
    assert events == []


FIELDS = [
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [*HI, 3]}, "messages[1]"),
    (CHAT, {"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
    (CHAT, {"messages": [*HI, {"role": "assistant", "content": None}, *HI]}, "messages[1].content"),
    (CHAT, {"tools": {"a": 1}}, "tools"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": 3}}]}, "tools[0].function.name"),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    (CHAT, {"max_tokens": "9"}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"seed": 10**30}, "seed"),
    (CHAT, {"stop": [3]}, "stop[0]"),
    (CHAT, {"stream": "yes"}, "stream"),
    (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    (RESPONSES, {"input": None}, "input"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": ""}, "input"),
    (RESPONSES, {"input": [3]}, "input[0]"),
    (RESPONSES, {"input": [{"role": "user", "content": []}]}, "input[0].content"),
    (RESPONSES, {"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    (RESPONSES, {"instructions": 3}, "instructions"),
    (RESPONSES, {"tools": "x"}, "tools"),
    (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0].name"),
    (RESPONSES, {"max_output_tokens": -1}, "max_output_tokens"),
    (RESPONSES, {"reasoning": {"effort": 3}}, "reasoning.effort"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"stream": 1}, "stream"),
    (MESSAGES, {"messages": None}, "messages"),
    (MESSAGES, {"messages": []}, "messages"),
    (MESSAGES, {"messages": [3]}, "messages[0]"),
    (MESSAGES, {"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
    (MESSAGES, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (MESSAGES, {"max_tokens": None}, "max_tokens"),
    (MESSAGES, {"max_tokens": 0.5}, "max_tokens"),
    (MESSAGES, {"system": {"a": 1}}, "system"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema"),
    (MESSAGES, {"stop_sequences": [""]}, "stop_sequences[0]"),
    (MESSAGES, {"thinking": {"type": "x"}}, "thinking.type"),
    (MESSAGES, {"stream": {}}, "stream"),
    *[(path, {"n": 2}, "n") for path in PATHS],
    *[(path, {"seed": True}, "seed") for path in PATHS],
    *[(path, {"chat_template_kwargs": 3}, "chat_template_kwargs") for path in PATHS],
]


async def test_a_field_that_is_wrong_is_400_and_named(loopback_clock, events):
    async with open_served(["x"]) as served:
        for path, fields, name in FIELDS:
            error = await refusal(served, path, json.dumps({**GOOD[path], **fields}).encode(), 400)
            assert name in error["message"], (path, fields)
            assert error.get("param", name) == name, (path, fields)
    assert events == []


@pytest.mark.parametrize("path", PATHS)
async def test_a_number_that_only_looks_finite_is_400_and_named(loopback_clock, path):
    """1e999 is a number by the rules of JSON, and infinite in every program that reads it."""
    body = json.dumps({**GOOD[path], "chat_template_kwargs": {"a": "HERE"}}).replace('"HERE"', "1e999").encode()

    assert "chat_template_kwargs" in (await read_error(path, body, 400))["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_over_the_limit_is_413(loopback_clock, path):
    body = json.dumps({**GOOD[path], "model": "x" * 2000}).encode()
    error = await read_error(path, body, 413, max_request_bytes=1000)

    assert "1000 bytes (--max-request-bytes)" in error["message"]
    assert error["type"] == ("request_too_large" if path == MESSAGES else "invalid_request_error")


@pytest.mark.parametrize("path", PATHS)
async def test_an_ended_session_and_an_unknown_one_are_404(loopback_clock, path):
    body = json.dumps(GOOD[path]).encode()
    async with open_served(["x"]) as served:
        await served.end()
        ended = await refusal(served, path, body, 404)
        served.session.credential = "rs-" + "x" * 40
        unknown = await refusal(served, path, body, 404)

    assert "no live session" in unknown["message"]
    assert unknown == ended
    assert ended["type"] == ("not_found_error" if path == MESSAGES else "invalid_request_error")
    assert unknown.get("code", "session_discarded") == "session_discarded"


@pytest.mark.parametrize("path", PATHS)
async def test_a_run_that_ends_is_503(loopback_clock, monkeypatch, path):
    async with open_served(["x"]) as served:
        monkeypatch.setattr(served.session.shared.sessions, "_is_stopping", lambda: True)
        error = await refusal(served, path, json.dumps(GOOD[path]).encode(), 503)

    assert "shutting down" in error["message"]
    assert error["type"] == ("overloaded_error" if path == MESSAGES else "server_error")


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_quotes_a_client_in_bounds(loopback_clock, path):
    """The log has these messages, and a client's text may be as long as a body."""
    odd = [{"role": "x" * 100_000, "content": "hi", "type": "message"}]
    body = {**GOOD[path], "input" if path == RESPONSES else "messages": odd}
    error = await read_error(path, json.dumps(body).encode(), 400)

    assert "[0].role must be " in error["message"]
    assert len(error["message"]) < 1100
