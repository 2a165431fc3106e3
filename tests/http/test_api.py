"""The front half over loopback on the virtual clock: holds, heartbeats, disconnects, delivery, retries."""

from __future__ import annotations

import json

import httpx
import pytest
import trio
from builders_api import (
    HI,
    OPERATOR,
    FakeSession,
    connect,
    make_completion,
    make_tool_message,
    open_api,
    raw_request,
)

from relax_trio.data.messages import Message
from relax_trio.errors import ContextLengthExceeded, InternalError

BODY = json.dumps({"messages": HI}).encode()
STREAM_BODY = json.dumps({"messages": HI, "stream": True}).encode()


async def read_all(stream) -> bytes:
    async with stream:
        return b"".join([chunk async for chunk in stream])


async def read_until(stream, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        chunk = await stream.receive_some()
        assert chunk, data
        data += chunk
    return data


# --- JSON --------------------------------------------------------------------------------------------------------


async def test_a_request_is_held_and_answered_when_the_turn_is_done(loopback_clock):
    session = FakeSession(delay_s=100.0)
    async with open_api(session) as api:
        start = trio.current_time()
        response = await api.chat()
        elapsed = trio.current_time() - start

    assert elapsed == pytest.approx(100.0)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json()["id"] == "chatcmpl-G17-2-r1"
    assert response.json()["choices"][0]["message"]["content"] == "Grüße"
    assert session.ends == [("delivered", 100.0)]


async def test_a_day_long_hold_is_not_cut_by_any_timer(loopback_clock):
    session = FakeSession(delay_s=86_400.0)
    async with open_api(session) as api:
        response = await api.chat()

    assert response.status_code == 200
    assert session.ends == [("delivered", 86_400.0)]


async def test_an_idle_connection_is_kept_for_hours(loopback_clock):
    async with open_api() as api:
        stream = await connect(api)
        for _ in range(2):
            await stream.send_all(raw_request(api, BODY))
            assert (await read_until(stream, b"}")).startswith(b"HTTP/1.1 200")
            await trio.sleep(10 * 3600)
        await stream.aclose()


async def test_the_path_without_v1_is_the_same_api(loopback_clock):
    session = FakeSession()
    async with open_api(session) as api:
        response = await api.client.post("/chat/completions", json={"messages": HI})

    assert response.status_code == 200
    assert len(session.calls) == 1


async def test_what_the_session_gets_is_the_canonical_request(loopback_clock):
    session = FakeSession()
    async with open_api(session) as api:
        await api.chat([{"role": "developer", "content": "a"}, *HI], max_tokens=5, stop="x", seed=3)

    request = session.calls[0].request
    assert request.messages == (Message(role="system", content="a"), Message(role="user", content="hi"))
    assert (request.max_tokens, request.stop, request.seed, request.model) == (5, ("x",), 3, "m")
    assert not request.retry


async def test_an_error_of_the_turn_is_a_reply_that_was_delivered(loopback_clock):
    session = FakeSession(delay_s=3.0, answer=InternalError("the engine failed r1"))
    async with open_api(session) as api:
        response = await api.chat()

    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the engine failed r1"
    assert session.ends == [("delivered", 3.0)]


# --- SSE ---------------------------------------------------------------------------------------------------------


async def test_sse_opens_at_once_beats_every_15_s_and_ends_together(loopback_clock):
    session = FakeSession(delay_s=47.0)
    async with open_api(session) as api:
        start = trio.current_time()
        body = {"messages": HI, "stream": True}
        async with api.client.stream("POST", "/v1/chat/completions", json=body) as response:
            frames = [(round(trio.current_time() - start, 6), chunk) async for chunk in response.aiter_raw()]

    assert response.headers["content-type"].startswith("text/event-stream")
    assert [at for at, _ in frames] == [0.0, 15.0, 30.0, 45.0, 47.0]
    assert [chunk for _, chunk in frames[:2]] == [b": connected\n\n", b": heartbeat\n\n"]
    data, done, rest = frames[-1][1].decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunk = json.loads(data.removeprefix("data: "))
    assert chunk["object"] == "chat.completion.chunk"
    assert chunk["choices"][0]["finish_reason"] == "stop"
    assert session.ends == [("delivered", 47.0)]


async def test_a_stream_is_held_for_an_hour(loopback_clock):
    session = FakeSession(delay_s=3601.0)
    async with open_api(session) as api:
        response = await api.chat(stream=True)

    assert response.text.count(": heartbeat") == 240
    assert response.text.endswith("data: [DONE]\n\n")
    assert session.ends == [("delivered", 3601.0)]


@pytest.mark.parametrize("hold_s", [320.0, pytest.param(3 * 3600.0, marks=pytest.mark.slow)])
async def test_every_api_holds_a_request_and_beats_all_the_while(loopback_clock, hold_s):
    """Six connections at once, JSON and SSE; what beats is what the client of that API ignores."""
    session = FakeSession(delay_s=hold_s)
    beats = {
        "/v1/chat/completions": b": heartbeat\n\n",
        "/v1/responses": b": heartbeat\n\n",
        "/v1/messages": b'event: ping\ndata: {"type":"ping"}\n\n',
    }
    bodies = {path: {"messages": HI, "max_tokens": 9, "input": "hi"} for path in beats}
    seen = {}

    async def stream(path):
        async with api.client.stream("POST", path, json={**bodies[path], "stream": True}) as response:
            assert response.status_code == 200
            seen[path] = [(round(trio.current_time() - start, 3), part) async for part in response.aiter_raw()]

    async def ask(path):
        response = await api.client.post(path, json=bodies[path])
        assert (response.status_code, trio.current_time() - start) == (200, pytest.approx(hold_s))

    async with open_api(session) as api:
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for path in beats:
                nursery.start_soon(stream, path)
                nursery.start_soon(ask, path)

    for path, beat in beats.items():
        opened, *held, (ended_at, end) = seen[path]
        assert opened[0] == 0.0
        assert held == [(15.0 * n, beat) for n in range(1, len(held) + 1)]
        assert hold_s - 15.0 <= 15.0 * len(held) <= hold_s
        assert ended_at == pytest.approx(hold_s)
        assert len(end) > 200
    assert session.ends == [("delivered", hold_s)] * 6


async def test_a_body_may_trickle_in(loopback_clock):
    session = FakeSession()

    async def chunks():
        for at in range(len(BODY)):
            await trio.sleep(10.0)
            yield BODY[at : at + 1]

    async with open_api(session) as api:
        response = await api.client.post("/v1/chat/completions", content=chunks())

    assert response.status_code == 200
    assert session.ends == [("delivered", 10.0 * len(BODY))]


async def test_a_turn_that_ends_on_a_heartbeat_is_not_delayed(loopback_clock):
    session = FakeSession(delay_s=30.0)
    async with open_api(session) as api:
        response = await api.chat(stream=True)

    assert response.text.count(": heartbeat") <= 2
    assert response.text.endswith("data: [DONE]\n\n")
    assert session.ends == [("delivered", 30.0)]


async def test_a_failure_after_the_stream_began_is_its_terminal_event(loopback_clock):
    session = FakeSession(delay_s=20.0, answer=InternalError("the engine failed r1"))
    async with open_api(session) as api:
        response = await api.chat(stream=True)

    frames = response.text.split("\n\n")
    assert response.status_code == 200
    assert frames[:2] == [": connected", ": heartbeat"]
    assert json.loads(frames[2].removeprefix("data: "))["error"]["code"] == "internal_error"
    assert frames[3:] == ["data: [DONE]", ""]
    assert session.ends == [("delivered", 20.0)]


async def test_a_refusal_before_the_stream_begins_is_a_status(loopback_clock):
    session = FakeSession(refusal=ContextLengthExceeded(n_prompt=99, max_context_len=64))
    async with open_api(session) as api:
        response = await api.chat(stream=True)

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 64 tokens" in error["message"]
    assert "99 tokens" in error["message"]
    assert session.ends == [("delivered", 0.0)]


async def test_a_turn_that_cannot_be_rendered_ends_the_stream_with_an_error(loopback_clock, events):
    session = FakeSession(delay_s=1.0, answer=make_completion(finish=float("nan")))
    async with open_api(session) as api:
        response = await api.chat(stream=True)

    assert '"internal_error"' in response.text
    assert response.text.endswith("data: [DONE]\n\n")
    assert [(e.fields["place"], "ValueError" in e.fields["error"]) for e in events] == [("G17/2", True)]


# --- disconnects -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [BODY, STREAM_BODY], ids=["json", "sse"])
async def test_a_client_that_leaves_during_the_hold_detaches_at_that_instant(loopback_clock, body):
    session = FakeSession(delay_s=100.0)
    async with open_api(session) as api:
        stream = await connect(api)
        await stream.send_all(raw_request(api, body))
        await trio.sleep(20.0)
        await stream.aclose()
        await trio.sleep(200.0)

    assert session.ends == [("detached", 20.0)]


async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_no_trace(loopback_clock):
    session = FakeSession()
    async with open_api(session) as api:
        stream = await connect(api)
        await stream.send_all(raw_request(api, BODY)[:-5])
        await trio.sleep(1.0)
        await stream.aclose()
        await trio.sleep(1.0)

    assert session.calls == []


@pytest.mark.parametrize("body", [BODY, STREAM_BODY], ids=["json", "sse"])
async def test_a_client_that_leaves_before_the_last_byte_was_not_served(loopback_clock, body):
    """The reply is larger than what the kernel buffers: the server stands in its last write when the client goes."""
    text = "x" * 32_000_000
    session = FakeSession(delay_s=10.0, answer=make_completion(Message(role="assistant", content=text)))
    async with open_api(session) as api:
        stream = await connect(api)
        await stream.send_all(raw_request(api, body))
        await trio.sleep(30.0)
        assert session.ends == []
        await stream.aclose()
        await trio.sleep(1.0)

    assert session.ends == [("detached", 30.0)]


async def test_a_large_reply_is_delivered_when_its_last_byte_goes_out(loopback_clock):
    text = "x" * 32_000_000
    session = FakeSession(delay_s=10.0, answer=make_completion(Message(role="assistant", content=text)))
    async with open_api(session) as api:
        stream = await connect(api)
        await stream.send_all(raw_request(api, BODY, headers=["connection: close"]))
        await trio.sleep(30.0)
        assert session.ends == []
        reply = await read_all(stream)

    assert len(reply) > 32_000_000
    assert session.ends == [("delivered", 30.0)]


@pytest.mark.parametrize(("body", "end"), [(BODY, b"}}}"), (STREAM_BODY, b"[DONE]\n\n\r\n")], ids=["json", "sse"])
async def test_a_client_that_leaves_on_the_last_byte_was_served(loopback_clock, body, end):
    """An agent may exit on its last event, before the server has closed the response."""
    session = FakeSession(delay_s=10.0)
    async with open_api(session) as api:
        for _ in range(20):
            async with await connect(api) as stream:
                await stream.send_all(raw_request(api, body))
                await read_until(stream, end)

    assert [how for how, _ in session.ends] == ["delivered"] * 20


async def test_a_pipelined_client_gets_its_replies_one_after_another(loopback_clock):
    session = FakeSession(delay_s=5.0)
    async with open_api(session) as api:
        stream = await connect(api)
        await stream.send_all(raw_request(api, BODY) + raw_request(api, BODY, headers=["connection: close"]))
        reply = await read_all(stream)

    assert reply.count(b"HTTP/1.1 200") == 2
    assert session.ends == [("delivered", 5.0), ("delivered", 10.0)]


# --- retries -----------------------------------------------------------------------------------------------------


async def test_a_marked_retry_joins_the_call_and_gets_the_same_reply(loopback_clock):
    session = FakeSession(delay_s=30.0)
    async with open_api(session) as api:
        first = await connect(api)
        await first.send_all(raw_request(api, BODY))
        await trio.sleep(10.0)
        await first.aclose()
        await trio.sleep(2.0)
        again = await api.client.post("/v1/chat/completions", content=BODY, headers={"x-stainless-retry-count": "1"})

    assert again.json()["id"] == "chatcmpl-G17-2-r1"
    assert len(session.calls) == 1
    assert session.ends == [("detached", 10.0), ("delivered", 30.0)]


async def test_a_retry_that_comes_before_the_break_is_seen_holds_the_call_by_itself(loopback_clock):
    session = FakeSession(delay_s=30.0)
    async with open_api(session) as api:
        first = await connect(api)
        await first.send_all(raw_request(api, BODY))
        await trio.sleep(1.0)
        second = await connect(api)
        await second.send_all(raw_request(api, BODY, headers=["x-stainless-retry-count: 1", "connection: close"]))
        await trio.sleep(1.0)
        await first.aclose()
        reply = await read_all(second)

    assert reply.startswith(b"HTTP/1.1 200")
    assert session.ends == [("detached", 2.0), ("delivered", 30.0)]


@pytest.mark.parametrize(
    ("count", "is_retry"),
    [
        ("0", False),
        ("1", True),
        ("02", True),
        ("x", False),
        ("²", False),
        ("", False),
        ("-1", False),
        ("000", False),
        ("9" * 5000, True),
    ],
)
async def test_only_a_positive_retry_count_marks_a_retry(loopback_clock, count, is_retry):
    session = FakeSession()
    async with open_api(session) as api:
        await api.chat(headers={"x-stainless-retry-count": count.encode("utf-8")})

    assert session.calls[0].request.retry is is_retry


async def test_the_digest_tells_bodies_and_paths_apart(loopback_clock):
    session = FakeSession()
    async with open_api(session) as api:
        for content, path in [(BODY, "/v1"), (BODY, "/v1"), (BODY + b" ", "/v1"), (BODY, "")]:
            await api.client.post(f"{path}/chat/completions", content=content)

    digests = [call.request.digest for call in session.calls]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


# --- views -------------------------------------------------------------------------------------------------------


async def test_tool_calls_come_with_null_content(loopback_clock):
    session = FakeSession(answer=make_completion(make_tool_message(reasoning_content="hm"), finish="tool_calls"))
    async with open_api(session) as api:
        message = (await api.chat()).json()["choices"][0]["message"]

    assert message["content"] is None
    assert message["reasoning_content"] == "hm"
    assert [call["id"] for call in message["tool_calls"]] == ["call_1", "call_2"]


async def test_debug_state_shows_each_credential_its_part(loopback_clock):
    async with open_api() as api:
        own = await api.client.get("/debug_state?forest=1")
        whole = await api.client.get("/debug_state", headers={"authorization": "Bearer secret-of-the-operator"})
        other = await api.client.get("/debug_state", headers={"authorization": "Bearer nobody"})

    assert own.json() == {"place": "G17/2", "forest": True}
    assert whole.json() == {"sessions": [{"place": "G17/2", "forest": False}]}
    assert other.status_code == 404


async def test_metrics_are_the_operators(loopback_clock):
    async with open_api() as api:
        shown = await api.client.get("/metrics", headers={"authorization": f"Bearer {OPERATOR}"})
        own = await api.client.get("/metrics")

    assert shown.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values = [line for line in shown.text.splitlines() if not line.startswith("#")]
    assert values == [
        "relax_trio_sessions 1",
        'relax_trio_requests{waiting_for="backend"} 1',
        'relax_trio_requests{waiting_for="lease"} 2',
        "relax_trio_attempts 1",
    ]
    assert own.status_code == 401
    assert "operator token" in own.json()["error"]["message"]


async def test_the_openapi_document_is_open_to_everyone(loopback_clock):
    async with open_api() as api, httpx.AsyncClient(base_url=api.url, trust_env=False) as stranger:
        response = await stranger.get("/openapi.json")

    assert response.status_code == 200
    assert response.json()["openapi"] == "3.1.0"


async def test_models_are_listed_and_any_name_is_a_model(loopback_clock):
    async with open_api() as api:
        listed = (await api.client.get("/v1/models")).json()
        bare = (await api.client.get("/models")).json()
        one = (await api.client.get("/v1/models/Qwen/Qwen3-8B")).json()

    assert listed == bare
    assert [model["id"] for model in listed["data"]] == ["demo"]
    assert (listed["object"], listed["has_more"], listed["first_id"]) == ("list", False, "demo")
    assert (one["id"], one["object"], one["type"]) == ("Qwen/Qwen3-8B", "model", "model")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["", "/"])
async def test_the_base_path_answers_probes_without_a_credential(loopback_clock, method, path):
    async with open_api() as api, httpx.AsyncClient(trust_env=False) as stranger:
        response = await stranger.request(method, api.url + path)

    assert response.status_code == 200


async def test_health_is_ok_until_the_run_ends(loopback_clock):
    async with open_api() as api:
        before = await api.client.get("/health")
        api.directory.closing = True
        after = await api.client.get("/health")

    assert (before.status_code, before.json()) == (200, {"status": "ok"})
    assert after.status_code == 503
