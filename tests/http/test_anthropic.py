"""The Messages endpoint over loopback on the virtual clock."""

from __future__ import annotations

import json

import pytest
import trio
from builders_api import CREDENTIAL, HI, FakeSession, make_completion, open_api

from relax_trio.data.messages import Message
from relax_trio.errors import ContextLengthExceeded, InternalError

BODY = {"model": "claude-x", "max_tokens": 64, "messages": HI}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def event_names(text: str) -> list[str]:
    return [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]


@pytest.mark.parametrize("path", ["/v1/messages", "/messages", "/v1/messages?beta=true"])
async def test_a_message_is_answered(loopback_clock, path):
    session = FakeSession(delay_s=100.0)
    headers = {"authorization": "", "x-api-key": CREDENTIAL, "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    async with open_api(session) as api:
        response = await api.client.post(path, json=BODY, headers=headers)

    assert response.status_code == 200
    assert response.json()["content"] == [{"type": "text", "text": "Grüße"}]
    assert response.json()["id"] == "msg_G17-2-r1"
    assert session.calls[0].request.messages == (Message(role="user", content="hi"),)
    assert session.ends == [("delivered", 100.0)]


async def test_a_stream_pings_at_once_and_every_15_s_and_ends_together(loopback_clock):
    session = FakeSession(delay_s=47.0)
    async with open_api(session) as api:
        start = trio.current_time()
        async with api.client.stream("POST", "/v1/messages", json={**BODY, "stream": True}) as response:
            frames = [(round(trio.current_time() - start, 6), chunk) async for chunk in response.aiter_raw()]

    assert response.headers["content-type"].startswith("text/event-stream")
    assert [at for at, _ in frames] == [0.0, 15.0, 30.0, 45.0, 47.0]
    assert [chunk for _, chunk in frames[:-1]] == [PING] * 4
    names = event_names(frames[-1][1].decode())
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert session.ends == [("delivered", 47.0)]


async def test_a_stream_that_fails_ends_with_an_error_event(loopback_clock):
    session = FakeSession(delay_s=3.0, answer=InternalError("the engine failed r1"))
    async with open_api(session) as api:
        response = await api.client.post("/v1/messages", json={**BODY, "stream": True})

    assert response.status_code == 200
    assert event_names(response.text) == ["ping", "error"]
    error = json.loads(response.text.split("data: ")[-1])
    assert error == {"type": "error", "error": {"type": "api_error", "message": "the engine failed r1"}}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_context_is_refused_by_status_in_anthropics_words(loopback_clock, stream):
    session = FakeSession(refusal=ContextLengthExceeded(n_prompt=99, max_context_len=64))
    async with open_api(session) as api:
        response = await api.client.post("/v1/messages", json={**BODY, "stream": stream})

    assert response.status_code == 400
    assert response.json()["error"]["message"] == "prompt is too long: 99 tokens > 64 maximum"


async def test_a_marked_retry_gets_the_reply_of_the_first_request(loopback_clock):
    session = FakeSession(delay_s=10.0)
    async with open_api(session) as api:
        with trio.move_on_after(5):
            await api.client.post("/v1/messages", json=BODY)
        response = await api.client.post("/v1/messages", json=BODY, headers={"x-stainless-retry-count": "1"})

    assert response.status_code == 200
    assert len(session.calls) == 1


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/messages/count_tokens?beta=true"])
async def test_tokens_are_counted_without_a_request(loopback_clock, path):
    session = FakeSession()
    async with open_api(session) as api:
        response = await api.client.post(path, json={"model": "claude-x", "messages": HI, "system": "terse"})

    assert (response.status_code, response.json()) == (200, {"input_tokens": 7})
    assert session.calls == []
    assert [message.role for message in session.counted[0].messages] == ["system", "user"]


@pytest.mark.parametrize("variables", [frozenset(), frozenset({"enable_thinking"})], ids=["without", "with"])
async def test_thinking_depends_on_the_template(loopback_clock, variables):
    session = FakeSession(answer=make_completion(Message(role="assistant", content="ok", reasoning_content="hm")))
    async with open_api(session, template_variables=variables) as api:
        response = await api.client.post("/v1/messages", json={**BODY, "thinking": {"type": "disabled"}})

    assert [block["type"] for block in response.json()["content"]] == ["thinking", "text"]
    assert session.calls[0].request.chat_template_kwargs == dict.fromkeys(variables, False)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_the_client_began_is_answered_with_the_rest(loopback_clock, stream):
    session = FakeSession(answer=make_completion(message=Message(role="assistant", content="Grüße!")))
    begun = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "Grü"}]}]
    async with open_api(session) as api:
        response = await api.client.post("/v1/messages", json={**BODY, "messages": begun, "stream": stream})

    assert response.status_code == 200
    request = session.calls[0].request
    assert (request.messages, request.prefill) == ((Message(role="user", content="hi"),), "Grü")
    assert ("ße!" in response.text, "Grüße!" in response.text) == (True, False)


@pytest.mark.parametrize("last", ["", [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]])
async def test_only_text_begins_a_turn(loopback_clock, last):
    session = FakeSession()
    async with open_api(session) as api:
        body = {**BODY, "messages": [*HI, {"role": "assistant", "content": last}]}
        await api.client.post("/v1/messages", json=body)

    assert [call.request.prefill for call in session.calls] in ([], [""])
