"""Every refusal: its status, its envelope, its headers, and that it leaves no trace in the Session."""

from __future__ import annotations

import json

import httpx
import pytest
import trio
from builders_api import CREDENTIAL, HI, OPERATOR, FakeSession, connect, open_api, raw_request

from relax_trio.errors import EngineFault, SessionDiscarded

PATH = "/v1/chat/completions"


def openai_error(response: httpx.Response) -> dict:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    return body["error"]


def anthropic_error(response: httpx.Response) -> dict:
    body = response.json()
    assert set(body) == {"type", "error"}
    assert set(body["error"]) == {"type", "message"}
    assert body["type"] == "error"
    return body["error"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"hello", "not valid JSON"),
        (b'{"messages": [], "seed": NaN}', "NaN"),
        (b'{"messages": [], "seed": -Infinity}', "Infinity"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 300 + b"]" * 300, "nested deeper than 200"),
        (b'{"messages": ' + b'{"a":' * 250 + b"1" + b"}" * 250 + b"}", "nested deeper than 200"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"model": "\xff"}', "not UTF-8"),
        ('{"messages": []}'.encode("utf-16"), "not UTF-8"),
        (b"[]", "must be a JSON object, not a list"),
        (b"null", "must be a JSON object, not null"),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else "",
)
async def test_a_body_that_is_no_json_object_is_refused(loopback_clock, events, body, says):
    session = FakeSession()
    async with open_api(session) as api:
        response = await api.client.post(PATH, content=body)

    error = openai_error(response)
    assert response.status_code == 400
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert session.calls == []
    assert events == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 2}, "n"), ({"stop": 3}, "stop"), ({"messages": [{"role": "x"}]}, "messages[0].role")],
)
async def test_a_refused_field_is_named(loopback_clock, fields, param):
    session = FakeSession()
    async with open_api(session) as api:
        response = await api.client.post(PATH, json={"messages": HI, **fields})

    assert response.status_code == 400
    assert openai_error(response)["param"] == param
    assert param in openai_error(response)["message"]
    assert session.calls == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Basic YTpi"},
        {"authorization": ""},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [PATH, "/v1/models", "/debug_state"])
async def test_a_missing_or_malformed_credential_is_401(loopback_clock, headers, path):
    async with open_api() as api, httpx.AsyncClient(base_url=api.url, trust_env=False) as stranger:
        method = "POST" if path == PATH else "GET"
        response = await stranger.request(method, path, headers=headers)

    assert response.status_code == 401
    assert openai_error(response)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {CREDENTIAL}"},
        {"authorization": f"bearer   {CREDENTIAL}"},
        {"x-api-key": CREDENTIAL},
        {"authorization": "Basic YTpi", "x-api-key": CREDENTIAL},
    ],
    ids=str,
)
async def test_both_sdks_ways_to_send_the_credential_are_accepted(loopback_clock, headers):
    async with open_api() as api, httpx.AsyncClient(base_url=api.url, trust_env=False) as client:
        response = await client.post(PATH, json={"messages": HI}, headers=headers)

    assert response.status_code == 200


@pytest.mark.parametrize("credential", ["unknown", OPERATOR, CREDENTIAL + "x", "ünknown".encode()])
async def test_a_credential_without_a_session_is_404_and_not_to_be_retried(loopback_clock, credential):
    prefix = b"Bearer " if isinstance(credential, bytes) else "Bearer "
    async with open_api() as api:
        response = await api.chat(headers={"authorization": prefix + credential})

    assert response.status_code == 404
    assert openai_error(response)["code"] == "session_discarded"
    assert response.headers["x-should-retry"] == "false"


async def test_a_run_that_is_ending_takes_no_requests(loopback_clock):
    session = FakeSession()
    async with open_api(session) as api:
        api.directory.closing = True
        response = await api.chat()

    assert response.status_code == 503
    assert openai_error(response)["code"] == "engine_unavailable"
    assert response.headers["x-should-retry"] == "false"
    assert session.calls == []


@pytest.mark.parametrize("path", ["/v1/completions", "/completions"])
async def test_text_completions_say_what_to_use(loopback_clock, path):
    async with open_api() as api:
        response = await api.client.post(path, json={"prompt": "hi"})

    assert response.status_code == 404
    assert "/v1/chat/completions" in openai_error(response)["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/messages", "/v1/messages/count_tokens", "/messages/count_tokens"])
@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "not valid JSON"),
        (b'{"messages": 3, "max_tokens": 1}', 400, "messages must be a list"),
        (b'{"messages": [{"role": "x"}], "max_tokens": 1}', 400, "messages[0].role"),
        (b" " * 2000, 413, "--max-request-bytes"),
    ],
)
async def test_refusals_of_messages_wear_anthropics_envelope(loopback_clock, path, body, status, says):
    session = FakeSession()
    async with open_api(session, max_request_bytes=1000) as api:
        response = await api.client.post(path, content=body)

    assert response.status_code == status
    assert says in anthropic_error(response)["message"]
    assert response.headers["x-should-retry"] == "false"
    assert (session.calls, session.counted) == ([], [])


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_credentials_are_refused_in_anthropics_envelope(loopback_clock, path):
    async with open_api() as api:
        unknown = await api.client.post(path, headers={"authorization": "Bearer unknown"})
        missing = await api.client.post(path, headers={"authorization": ""})
        api.directory.closing = True
        closing = await api.client.post(path)

    assert (unknown.status_code, anthropic_error(unknown)["type"]) == (404, "not_found_error")
    assert (missing.status_code, anthropic_error(missing)["type"]) == (401, "authentication_error")
    assert (closing.status_code, anthropic_error(closing)["type"]) == (503, "overloaded_error")


async def test_an_unknown_path_below_messages_is_404_in_anthropics_envelope(loopback_clock):
    async with open_api() as api:
        response = await api.client.post("/v1/messages/nowhere", json={"messages": HI})

    assert response.status_code == 404
    assert anthropic_error(response)["type"] == "not_found_error"


async def test_models_are_refused_in_the_envelope_of_the_sdk_that_asks(loopback_clock):
    stranger = {"authorization": "Bearer unknown"}
    async with open_api() as api:
        openai = await api.client.get("/v1/models", headers=stranger)
        anthropic = await api.client.get("/v1/models", headers={**stranger, "anthropic-version": "2023-06-01"})

    assert openai_error(openai)["code"] == "session_discarded"
    assert anthropic_error(anthropic)["type"] == "not_found_error"


@pytest.mark.parametrize("path", ["/v1/nowhere", "/v2/chat/completions", "/chat"])
async def test_an_unknown_path_is_404_in_the_envelope(loopback_clock, path):
    async with open_api() as api:
        response = await api.client.post(path, json={"messages": HI})

    assert response.status_code == 404
    assert path in openai_error(response)["message"]


async def test_a_path_outside_of_the_base_is_404_that_says_where_the_api_is(loopback_clock):
    async with open_api() as api:
        response = await api.client.post(f"http://127.0.0.1:{api.port}/v1/chat/completions", json={})

    assert response.status_code == 404
    assert "/agentic_api/v1/chat/completions" in openai_error(response)["message"]


@pytest.mark.parametrize(("method", "path", "allow"), [("GET", PATH, "POST"), ("POST", "/v1/models", "GET")])
async def test_a_wrong_method_is_405_in_the_envelope(loopback_clock, method, path, allow):
    async with open_api() as api:
        response = await api.client.request(method, path)

    assert response.status_code == 405
    assert openai_error(response)["code"] == "method_not_allowed"
    assert allow in response.headers["allow"]


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_limit_is_413_and_the_client_can_read_why(loopback_clock, announced):
    """The body is far larger than the socket buffers: unless it is read to its end, the answer is lost in a reset."""
    session = FakeSession()
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 9_000_000}]}).encode()

    async def chunks():
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    async with open_api(session, max_request_bytes=8_000_000) as api:
        response = await api.client.post(PATH, content=body if announced else chunks())

    assert response.status_code == 413
    assert openai_error(response)["code"] == "request_too_large"
    assert "8000000 bytes (--max-request-bytes)" in openai_error(response)["message"]
    assert session.calls == []


async def test_a_body_at_the_limit_is_taken(loopback_clock):
    body = json.dumps({"messages": HI}).encode()
    async with open_api(max_request_bytes=len(body)) as api:
        response = await api.client.post(PATH, content=body)

    assert response.status_code == 200


async def test_a_client_that_never_ends_its_refused_body_is_answered_all_the_same(loopback_clock):
    async with open_api(max_request_bytes=1000) as api, await connect(api) as stream:
        await stream.send_all(raw_request(api, b"x" * 2000)[:-500])
        start = trio.current_time()
        reply = await stream.receive_some()
        assert trio.current_time() - start == pytest.approx(5.0)

    assert reply.startswith(b"HTTP/1.1 413")


class CountingPool:
    n_calls = 0

    async def run(self, fn, *args):
        self.n_calls += 1
        return fn(*args)


async def test_a_large_body_is_parsed_off_the_event_loop(loopback_clock):
    session, cpu = FakeSession(), CountingPool()
    async with open_api(session, cpu=cpu) as api:
        await api.chat()
        assert cpu.n_calls == 0
        await api.chat([{"role": "user", "content": "x" * 300_000}])

    assert cpu.n_calls == 1
    assert len(session.calls[1].request.messages[0].content) == 300_000


async def test_what_stands_before_a_known_history_counts_as_part_of_a_large_body(loopback_clock):
    cpu = CountingPool()
    async with open_api(cpu=cpu) as api:
        for n_messages in (1, 2):
            body = json.dumps({"metadata": "x" * 300_000, "messages": HI * n_messages})
            assert (await api.client.post("/v1/chat/completions", content=body)).status_code == 200

    assert cpu.n_calls == 2


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://127.0.0.1:1/agentic_api/v1/chat/completions", 200),
        ("/agentic_api//v1/chat/completions/", 200),
        ("http://127.0.0.1:1/agentic_api/nothing", 404),
        ("http://[", 404),
        ("*", 404),
        ("?beta=true", 404),
    ],
)
async def test_a_target_is_a_path_however_it_is_written(loopback_clock, target, status):
    session = FakeSession()
    async with open_api(session) as api, await connect(api) as stream:
        request = raw_request(api, json.dumps({"messages": HI}).encode(), headers=["connection: close"])
        await stream.send_all(request.replace(b"/agentic_api/v1/chat/completions", target.encode(), 1))
        reply = b"".join([part async for part in stream])

    assert reply.startswith(b"HTTP/1.1 %d" % status), reply
    assert json.loads(reply.partition(b"\r\n\r\n")[2])
    assert len(session.calls) == (status == 200)


async def test_a_session_that_ended_while_its_request_was_read_keeps_no_history(loopback_clock):
    session = FakeSession(broken=SessionDiscarded("it ended"))
    async with open_api(session) as api:
        assert (await api.chat()).status_code == 404
        assert session.histories._histories == []
        session.broken = None
        assert (await api.chat()).status_code == 200

    assert len(session.histories._histories) == 1


@pytest.mark.parametrize("error", [EngineFault("a bug"), KeyError(CREDENTIAL)], ids=["fault", "secret"])
async def test_a_bug_is_a_500_and_an_event_with_the_place(loopback_clock, events, capfd, error):
    async with open_api(FakeSession(broken=error)) as api:
        response = await api.chat()

    assert response.status_code == 500
    assert openai_error(response)["code"] == "internal_error"
    assert "G17/2" in openai_error(response)["message"]
    [event] = events
    assert event.name == "api.failed"
    assert event.fields["place"] == "G17/2"
    assert event.fields["error"].startswith(type(error).__name__)
    told = str(event.fields) + response.text + "".join(capfd.readouterr())
    assert CREDENTIAL not in told


async def test_a_websocket_is_refused(loopback_clock):
    async with open_api() as api, await connect(api) as stream:
        await stream.send_all(
            b"GET /agentic_api/v1/responses HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        reply = await stream.receive_some()

    assert b" 101 " not in reply.split(b"\r\n")[0]
    assert reply.startswith(b"HTTP/1.1 4")
