"""Responses over HTTP on the virtual clock: paths, the buffered stream, failures before and after it began."""

from __future__ import annotations

import json

import pytest
import trio
from builders_api import FakeSession, open_api

from relax_trio.errors import ContextLengthExceeded, InternalError


def events_of(text):
    return [json.loads(frame.partition("data: ")[2]) for frame in text.split("\n\n") if "data: " in frame]


@pytest.mark.parametrize("path", ["/v1/responses", "/responses"])
async def test_both_paths_are_the_responses_api(loopback_clock, path):
    session = FakeSession(delay_s=3.0)
    async with open_api(session) as api:
        reply = (await api.client.post(path, json={"input": "hi"})).json()
        again = (await api.client.post(path, json={"input": "hi"})).json()

    assert (reply["object"], reply["status"]) == ("response", "completed")
    assert reply["id"] == again["id"] == "resp_G17-2-r1"  # of the call's name, and the fake has but one
    assert session.ends == [("delivered", 3.0), ("delivered", 6.0)]


async def test_a_stream_opens_at_once_beats_every_15_s_and_ends_together(loopback_clock):
    session = FakeSession(delay_s=32.0)
    async with open_api(session) as api:
        start = trio.current_time()
        body = {"input": "hi", "stream": True}
        async with api.client.stream("POST", "/v1/responses", json=body) as response:
            frames = [(round(trio.current_time() - start, 6), chunk) async for chunk in response.aiter_raw()]

    assert response.headers["content-type"].startswith("text/event-stream")
    assert [at for at, _ in frames] == [0.0, 15.0, 30.0, 32.0]
    assert [chunk for _, chunk in frames[:3]] == [b": connected\n\n", b": heartbeat\n\n", b": heartbeat\n\n"]
    events = events_of(frames[3][1].decode())
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert session.ends == [("delivered", 32.0)]


async def test_a_failure_after_the_stream_began_is_its_terminal_event(loopback_clock):
    session = FakeSession(delay_s=20.0, answer=InternalError("the engine failed r1"))
    async with open_api(session) as api:
        response = await api.client.post("/v1/responses", json={"input": "hi", "stream": True, "model": "gpt"})

    events = events_of(response.text)
    assert response.status_code == 200
    assert [event["type"] for event in events] == ["response.created", "error", "response.failed"]
    assert events[-1]["response"]["error"]["message"] == "the engine failed r1"
    assert session.ends == [("delivered", 20.0)]


@pytest.mark.parametrize("stream", [False, True], ids=["json", "sse"])
async def test_a_refusal_of_the_turn_is_a_status_in_the_envelope_of_openai(loopback_clock, stream):
    session = FakeSession(refusal=ContextLengthExceeded(n_prompt=99, max_context_len=64))
    async with open_api(session) as api:
        response = await api.client.post("/v1/responses", json={"input": "hi", "stream": stream})

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_a_refused_body_names_its_field_and_begins_nothing(loopback_clock):
    session = FakeSession()
    async with open_api(session) as api:
        response = await api.client.post("/v1/responses", json={"input": [{"type": "message", "role": "x"}]})

    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["param"], error["type"]) == ("input[0].role", "invalid_request_error")
    assert session.calls == []


async def test_a_marked_retry_joins_the_call_and_gets_the_same_bytes(loopback_clock):
    session = FakeSession(delay_s=10.0)
    replies = []
    async with open_api(session) as api:

        async def post(retry):
            body = {"input": "hi", "stream": True}
            headers = {"x-stainless-retry-count": str(retry)}
            response = await api.client.post("/v1/responses", json=body, headers=headers)
            replies.append(response.text)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(post, 0)
            await trio.sleep(1.0)
            nursery.start_soon(post, 1)

    assert len(session.calls) == 1
    assert events_of(replies[0]) == events_of(replies[1])
