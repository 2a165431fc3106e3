"""From a URL to a server that generates: what is told of while nothing does. On the virtual clock, with no server."""

from __future__ import annotations

import pytest
import trio

from relax_trio.backend.sglang.client import Probe
from relax_trio.backend.sglang.connect import connect
from relax_trio.backend.sglang.wire import ServerInfo
from relax_trio.errors import BackendUnavailable


class Client:
    """Refuses until `ready_s`."""

    name, url = "SGLang server 0", "http://127.0.0.1:1"

    def __init__(self, ready_s):
        self.ready_s = ready_s

    async def info(self):
        await trio.lowlevel.checkpoint()
        if trio.current_time() < self.ready_s:
            raise BackendUnavailable("connection refused")
        return ServerInfo(version="0.5.23", max_context_len=100, max_total_tokens=1000)

    async def probe(self, seconds):
        await trio.lowlevel.checkpoint()
        return Probe(True, "v1")


def told(events):
    return [(event.fields["seconds"], event.fields["problem"]) for event in events if event.name == "server.waiting"]


async def test_a_long_wait_is_told_of_with_what_is_wrong(autojump_clock, events):
    server = await connect(Client(75.0), 600.0)

    assert (server.has_spans, trio.current_time()) == (True, 75.0)
    assert told(events) == [(10, "connection refused"), (70, "connection refused")]


async def test_a_short_wait_is_not(autojump_clock, events):
    await connect(Client(9.0), 600.0)
    assert told(events) == []


async def test_a_wait_that_is_in_vain_ends_with_what_was_wrong_last(autojump_clock, events):
    with pytest.raises(BackendUnavailable, match="does not generate after 30 s: connection refused"):
        await connect(Client(75.0), 30.0)
    assert trio.current_time() == 30.0
