"""Images behind URLs: fetched once, bounded, and refused with a reason."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial

import h11
import pytest
import trio
from builders_vision import data_url, picture

from relax_trio.backend import fetch
from relax_trio.backend.fetch import fetch_image
from relax_trio.data.messages import ImagePart, Message
from relax_trio.errors import InvalidRequest
from relax_trio.runtime.images import Images
from relax_trio.sync.cpu import InlineCpuPool
from relax_trio.tokens.vision import NoVision, open_image, read_data_url

PNG = read_data_url(data_url(picture()))


@asynccontextmanager
async def serving(answers):
    """A server of these paths: (status, headers, body); yields its URL and the paths that were asked for."""
    asked = []

    async def connection(stream):
        http = h11.Connection(h11.SERVER)
        try:
            while True:
                event = http.next_event()
                if event is h11.NEED_DATA:
                    http.receive_data(await stream.receive_some(65536))
                elif isinstance(event, h11.Request):
                    path = event.target.decode().partition("?")[0]
                    asked.append(path)
                    status, headers, body = answers[path]
                    head = [*headers, ("content-length", str(len(body))), ("connection", "close")]
                    await stream.send_all(http.send(h11.Response(status_code=status, headers=head)))
                    await stream.send_all(http.send(h11.Data(data=body)) + http.send(h11.EndOfMessage()))
                    return
        except trio.BrokenResourceError:
            return

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, connection, 0, host="127.0.0.1"))
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", asked
        nursery.cancel_scope.cancel(reason="the test is done")


def shown_at(url):
    return Message(role="user", content=(ImagePart(url),))


class Sighted:
    """A `Vision` that tells what it was given."""

    pads = object()

    def encode(self, url):
        return open_image(read_data_url(url)).size


async def test_an_image_is_fetched_once_in_a_session():
    async with serving({"/a.png": (200, [], PNG)}) as (url, asked):
        images = Images()
        message = [shown_at(f"{url}/a.png")]
        assert await images.of(message, Sighted(), InlineCpuPool()) == ((84, 56),)
        assert await images.of(message * 2, Sighted(), InlineCpuPool()) == ((84, 56),) * 2
    assert asked == ["/a.png"]


async def test_a_redirect_is_followed_but_not_for_ever():
    answers = {"/a": (302, [("location", "/b")], b""), "/b": (200, [], PNG), "/c": (302, [("location", "/c")], b"")}
    async with serving(answers) as (url, asked):
        assert read_data_url(await fetch_image(f"{url}/a")) == PNG
        with pytest.raises(InvalidRequest, match="redirect"):
            await fetch_image(f"{url}/c")
    assert asked.count("/c") == 4


async def test_what_can_not_be_fetched_is_refused_without_its_query(monkeypatch):
    monkeypatch.setattr(fetch, "MAX_BYTES", 1000)
    async with serving({"/no": (404, [], b""), "/big": (200, [], bytes(2000))}) as (url, _):
        with pytest.raises(InvalidRequest, match=r"/no answers 404") as caught:
            await fetch_image(f"{url}/no?token=secret")
        assert "secret" not in caught.value.message
        with pytest.raises(InvalidRequest, match="is larger than 1000 bytes"):
            await fetch_image(f"{url}/big")
    for bad in ("http://127.0.0.1:1/x", "http://[", "http://"):
        with pytest.raises(InvalidRequest, match="can't be fetched"):
            await fetch_image(bad)


async def test_a_server_that_never_answers_is_given_up(autojump_clock):
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, _hold, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        with pytest.raises(InvalidRequest, match=r"was not fetched within|can't be fetched"):
            await fetch_image(f"http://127.0.0.1:{port}/x")
        nursery.cancel_scope.cancel(reason="the test is done")


async def test_a_text_checkpoint_fetches_nothing():
    async with serving({"/a.png": (200, [], PNG)}) as (url, asked):
        with pytest.raises(InvalidRequest, match="takes no images"):
            await Images().of([shown_at(f"{url}/a.png")], NoVision(), InlineCpuPool())
    assert asked == []


async def _hold(stream):
    await trio.sleep_forever()
