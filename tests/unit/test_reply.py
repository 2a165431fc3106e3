"""When a reply counts as delivered: the moments at which a client may be found gone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import trio
import trio.testing

from relax_trio.api.failures import tell_failure
from relax_trio.api.reply import Reply, ReplyTracker, find_reply
from relax_trio.api.transport import Transport
from relax_trio.ids import new_credential

OTHER = "whatever a client sent"


class Call:
    def __init__(self):
        self.ends = []

    def detach(self):
        self.ends.append("detached")

    def delivered(self):
        self.ends.append("delivered")


class ScriptedStream:
    """A socket stream whose next read or write does what it is told."""

    socket = None

    def __init__(self, result=b"", error=None):
        self.result, self.error = result, error

    async def send_all(self, data):
        await self._run()

    async def receive_some(self, max_bytes=None):
        await self._run()
        return self.result

    async def _run(self):
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error


def make_reply(**state):
    transport = SimpleNamespace(**{"is_gone": False, "has_failed": False, **state})
    reply, call = Reply(transport), Call()
    reply.hold(call)
    return reply, call, transport


async def test_a_reply_whose_last_part_was_written_is_delivered():
    reply, call, _ = make_reply()

    assert [part async for part in reply.last_part(b"all")] == [b"all"]
    reply.lost()

    assert call.ends == ["delivered"]


async def test_a_client_found_gone_before_the_last_part_did_not_get_it():
    reply, call, _ = make_reply(is_gone=True)

    async for _ in reply.last_part(b"all"):
        pass

    assert call.ends == ["detached"]


async def test_a_client_that_closes_while_its_last_part_is_taken_got_it():
    """The kernel has the bytes; the server's reader ran before its writer did."""
    reply, call, transport = make_reply()

    async for _ in reply.last_part(b"all"):
        transport.is_gone = True
    reply.lost()

    assert call.ends == ["delivered"]


async def test_a_last_part_that_could_not_be_written_is_lost():
    reply, call, transport = make_reply()

    async for _ in reply.last_part(b"all"):
        transport.is_gone = transport.has_failed = True
    reply.lost()

    assert call.ends == ["detached"]


async def test_a_request_that_ends_before_its_last_part_was_written_is_lost():
    reply, call, _ = make_reply()
    parts = reply.last_part(b"all")
    await anext(parts)

    reply.lost()
    await parts.aclose()

    assert call.ends == ["detached"]


@pytest.mark.parametrize("error", [None, ValueError])
async def test_the_tracker_ends_the_reply_with_the_request(error):
    call = Call()

    async def app(scope, receive, send):
        find_reply(scope).hold(call)
        if error is not None:
            raise error

    try:
        await ReplyTracker(app)({"type": "http"}, None, None)
    except ValueError as exc:
        assert error is type(exc)  # noqa: PT017

    assert call.ends == ["detached"]


async def test_a_disconnect_is_told_before_the_end_of_the_response_and_held_back_after_it(autojump_clock):
    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    async def app(scope, receive, send):
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        with trio.move_on_after(10) as scope:
            await receive()
        assert scope.cancelled_caught

    await ReplyTracker(app)({"type": "http"}, receive, send)


@pytest.mark.parametrize(
    ("result", "error", "is_gone"),
    [(b"x", None, False), (b"", None, True), (b"", trio.BrokenResourceError(), True)],
    ids=["data", "end", "reset"],
)
async def test_a_transport_knows_that_its_client_is_gone(result, error, is_gone):
    transport = Transport(ScriptedStream(result, error))
    try:
        assert await transport.receive_some(10) == result
    except trio.BrokenResourceError as exc:
        assert exc is error  # noqa: PT017

    assert (transport.is_gone, transport.has_failed) == (is_gone, False)


async def test_a_transport_knows_that_a_write_failed():
    transport = Transport(ScriptedStream())
    await transport.send_all(b"x")
    assert not transport.has_failed

    broken = Transport(ScriptedStream(error=trio.BrokenResourceError()))
    with pytest.raises(trio.BrokenResourceError):
        await broken.send_all(b"x")

    assert broken.has_failed


def test_a_failure_is_told_without_credentials(events):
    credential = new_credential()
    try:
        raise KeyError(credential)
    except KeyError as exc:
        tell_failure(exc, place=None, path=f"/x/{credential}/{OTHER}", secret=OTHER)

    [event] = events
    assert event.fields["error"] == "KeyError: '<credential>'"
    assert event.fields["path"] == "/x/<credential>/<credential>"
    assert credential not in str(event.fields["trace"])
