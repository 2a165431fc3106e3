"""The server: where it listens, how it stops."""

from __future__ import annotations

import json
import socket

import httpx
import pytest
import trio
from builders_api import HI, OPERATOR, FakeDirectory, FakeSession, connect, make_completion, open_api, raw_request

from relax_trio.api.app import make_app
from relax_trio.api.serve import GRACEFUL_S, MARGIN_S, ApiServer
from relax_trio.config.tree import ServerConfig
from relax_trio.data.messages import Message
from relax_trio.errors import ConfigError
from relax_trio.sync.cpu import InlineCpuPool

BODY = json.dumps({"messages": HI}).encode()


def make_server(**config):
    server_config = ServerConfig(**config)
    app = make_app(FakeDirectory({}), config=server_config, operator_token=OPERATOR, cpu=InlineCpuPool())
    return ApiServer(app, server_config)


@pytest.mark.parametrize(
    ("host", "name"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", "localhost"), ("::", "[::1]")],
)
async def test_the_base_url_is_one_that_agents_can_use(host, name):
    async with trio.open_nursery() as nursery:
        server = make_server(host=host)
        try:
            url = await nursery.start(server.run)
        except ConfigError:
            if host == "::":
                pytest.skip("this machine has no IPv6")
            raise
        async with httpx.AsyncClient(trust_env=False) as client:
            response = await client.get(f"{url}/health")
        server.stop()

    assert response.status_code == 200
    assert url == f"http://{name}:{httpx.URL(url).port}/agentic_api"


async def test_a_port_in_use_is_a_configuration_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        async with trio.open_nursery() as nursery:
            with pytest.raises(ConfigError, match=f"--port {port} can't be listened on"):
                await nursery.start(make_server(port=port).run)


async def test_a_host_that_is_not_ours_is_a_configuration_error():
    async with trio.open_nursery() as nursery:
        with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1"):
            await nursery.start(make_server(host="192.0.2.1").run)


async def test_stop_closes_idle_connections_and_the_port_at_once(loopback_clock):
    async with open_api() as api:
        idle = await connect(api)
        used = await connect(api)
        await used.send_all(raw_request(api, BODY))
        await used.receive_some()
        await trio.sleep(1.0)
        start = trio.current_time()
        api.server.stop()
        for stream in (idle, used):
            async with stream:
                while await stream.receive_some():
                    pass
        assert trio.current_time() == start
        with pytest.raises(OSError):  # noqa: PT011
            await connect(api)


async def test_stop_lets_an_open_request_end_within_the_grace(loopback_clock):
    session = FakeSession(delay_s=GRACEFUL_S - 1.0)
    async with open_api(session) as api, trio.open_nursery() as nursery:
        nursery.start_soon(api.chat)
        await trio.sleep(0.5)
        api.server.stop()

    assert session.ends == [("delivered", GRACEFUL_S - 1.0)]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_detaches_what_the_grace_does_not_suffice_for(loopback_clock, stream):
    session = FakeSession(delay_s=1000.0)
    async with open_api(session) as api, await connect(api) as client:
        await client.send_all(raw_request(api, json.dumps({"messages": HI, "stream": stream}).encode()))
        await trio.sleep(10.0)
        api.server.stop()
        while await client.receive_some():
            pass

    assert session.ends == [("detached", 10.0 + GRACEFUL_S)]


async def test_cancelling_the_server_ends_it_the_same_way(loopback_clock):
    session = FakeSession(delay_s=2.0)
    with trio.CancelScope() as scope:
        async with open_api(session) as api:
            client = await connect(api)
            await client.send_all(raw_request(api, BODY))
            await trio.sleep(1.0)
            start = trio.current_time()
            scope.cancel()

    assert trio.current_time() - start == pytest.approx(1.0)
    assert session.ends == [("delivered", 2.0)]
    await client.aclose()


async def test_a_client_that_stopped_reading_cannot_hold_the_server(loopback_clock, events):
    text = "x" * 32_000_000
    session = FakeSession(answer=make_completion(Message(role="assistant", content=text)))
    async with open_api(session) as api:
        stream = await connect(api)
        await stream.send_all(raw_request(api, BODY))
        await trio.sleep(10.0)
        start = trio.current_time()

    assert trio.current_time() - start == pytest.approx(GRACEFUL_S + MARGIN_S)
    assert session.ends == [("detached", start + GRACEFUL_S + MARGIN_S)]
    assert [event.name for event in events] == ["cleanup.timed_out"]
    await stream.aclose()


GARBAGE = [
    b"\x00" * 100,
    b"\x16\x03\x01\x02\x00\x01\x00",  # a TLS hello
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /agentic_api/health HTTP/1.1\r\n\r\n",  # no host
    b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /%ff%00 HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET * HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /agentic_api HTTP/1.1\r\nhost: \xff\r\nauthorization: \xff\r\n\r\n",
    b"GET /agentic_api/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer \xff\r\n\r\n",
    b"GET /agentic_api/debug_state HTTP/1.1\r\nhost: a\r\nauthorization: Bearer \xff\r\n\r\n",
    b"GET /agentic_api HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
    b"POST /agentic_api/v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
    b"POST /agentic_api/v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
    b"POST /agentic_api/v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
    b"GET / HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: !\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda g: repr(g[:40]))
async def test_garbage_on_one_connection_leaves_the_server_and_the_log_alone(loopback_clock, events, capfd, garbage):
    async with open_api() as api:
        async with await connect(api) as stream:
            await stream.send_all(garbage)
            with trio.move_on_after(30.0):
                await stream.receive_some()
        await trio.sleep(1.0)
        response = await api.chat()

    assert response.status_code == 200
    assert events == []
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize(
    "poison",
    [
        b"GET / HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\nconnection: upgrade\r\nhttp2-settings: !x\r\n"
        b"authorization: Bearer rs-secret-of-the-session\r\n\r\n",
    ],
)
async def test_what_makes_the_http_library_itself_fail_costs_only_its_connection(loopback_clock, events, poison):
    async with open_api() as api:
        async with await connect(api) as stream:
            await stream.send_all(poison)
            while await stream.receive_some():
                pass
        response = await api.chat()

    assert response.status_code == 200
    assert [event.name for event in events] == ["connection.failed"]
    assert "secret" not in str(events[0].fields)
