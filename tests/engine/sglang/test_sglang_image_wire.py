"""Attempts with images on servers in recorded words: one placeholder each, legs that go on, wrong answers."""

from __future__ import annotations

import pytest
import trio
from attrs import evolve
from builders_backend import CONTEXT_LEN, VOCAB_LEN, make_attempt, serving
from builders_sglang import backend_on
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_wire import VERSIONS, token_at, wire_server

from relax_trio.backend.base import WeightSource
from relax_trio.data.image import EncodedImage
from relax_trio.errors import BackendProtocolError, PromptRefused
from relax_trio.tokens.pads import Pads

pytestmark = pytest.mark.engine

PAD, VIDEO = 90, 91
PADS = Pads(image_id=PAD, texts={PAD: "<|image_pad|>", VIDEO: "<|video_pad|>"})
N = 3
FIRST, SECOND = (EncodedImage(url=f"data:image/png;base64,{name}", n_tokens=N) for name in ("first", "second"))


def decode(ids):
    return "".join(PADS.texts.get(token_id, "<image>" if token_id == 89 else "x") for token_id in ids)


@pytest.fixture(params=VERSIONS)
async def server(request):
    async with wire_server(request.param, context_len=CONTEXT_LEN + 6, tokens_per_s=1000.0) as server:
        server.pad_id, server.image_len = PAD, N
        yield server


@pytest.fixture
def make(checkpoint, tmp_path, server):
    def make(**options):
        return backend_on(checkpoint, tmp_path, server.url, decode=decode, vocab_len=VOCAB_LEN, pads=PADS, **options)

    return make


def attempt(*prefix, images=(), **fields):
    return evolve(make_attempt(prefix, **fields), images=images)


def allowed(prefix_len, n):
    tokens = [token_at(prefix_len + k, VOCAB_LEN) for k in range(n)]
    return [token + (2 if token == PAD else 1 if token == VIDEO else 0) for token in tokens]


def sent(server):
    """Bodies of attempts; probes have no rid."""
    return [body for body in server.bodies if "rid" in body]


async def test_one_placeholder_is_sent_for_each_image_and_all_are_counted(make, server):
    prefix = [5, *[PAD] * N, 6, *[PAD] * N, 7]
    async with serving(make()) as backend:
        result = await backend.generate(attempt(*prefix, images=(FIRST, SECOND), max_new_tokens=6))
    (body,) = sent(server)
    assert body["input_ids"] == [5, PAD, 6, PAD, 7]
    assert body["image_data"] == [FIRST.url, SECOND.url]
    assert result.token_ids.tolist() == allowed(len(prefix), 6)


async def test_a_turn_that_was_called_back_goes_on_with_its_image(make, server):
    prefix = [5, *[PAD] * N, 6]
    async with serving(make()) as backend:
        flying = attempt(*prefix, images=(FIRST,), max_new_tokens=400)
        results = []

        async def fly():
            results.append(await backend.generate(flying))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fly)
            await backend.generate(attempt(3, session="pace", max_new_tokens=30))
            await backend.abort(flying.rid)
        (aborted,) = results
        rest = await backend.generate(attempt(*prefix, *aborted.token_ids, images=(FIRST,), max_new_tokens=5))
    n = len(aborted.token_ids)
    assert aborted.finish == "abort"
    assert [*aborted.token_ids, *rest.token_ids] == allowed(len(prefix), n + 5)
    assert sent(server)[-1]["input_ids"] == [5, PAD, 6, *aborted.token_ids]


async def test_an_image_has_another_name_under_new_weights(make, server, model):
    async with serving(make()) as backend:
        for _ in range(2):
            await backend.generate(attempt(5, *[PAD] * N, images=(FIRST,), max_new_tokens=2))
        await backend.update_weights("v2", WeightSource(tensors=model.state_dict()))
        await backend.generate(attempt(5, *[PAD] * N, images=(FIRST,), max_new_tokens=2))
    first, again, later = (body["mm_hashes"] for body in sent(server))
    assert first == again != later


async def test_a_server_that_reads_other_images_is_found_out(make, server):
    server.image_len = N + 1
    async with serving(make()) as backend:
        with pytest.raises(BackendProtocolError, match="read 5 prompt tokens where 4 were meant"):
            await backend.generate(attempt(5, *[PAD] * N, images=(FIRST,)))
        assert (await backend.generate(attempt(5, max_new_tokens=2))).finish == "length"


async def test_a_server_that_generates_a_placeholder_all_the_same_is_found_out(make, server):
    server.minds_bias = False
    async with serving(make()) as backend:
        with pytest.raises(BackendProtocolError, match="a placeholder of an image, though it was forbidden"):
            await backend.generate(attempt(5, max_new_tokens=97))


IMAGE = (PAD,) * N
PIECES = st.lists(st.sampled_from([(5,), (89,), IMAGE]), min_size=1, max_size=5).filter(lambda found: IMAGE in found)


@settings(max_examples=30, deadline=None)
@given(PIECES)
def test_no_prompt_with_an_image_makes_a_server_hang(checkpoint, tmp_path_factory, pieces):
    """Whatever its text is: it is answered, or it is never sent."""
    prefix = [token_id for piece in pieces for token_id in piece]
    n_images = pieces.count(IMAGE)

    async def one():
        async with wire_server("0.5.23", context_len=CONTEXT_LEN + 6, tokens_per_s=float("inf")) as server:
            server.pad_id, server.image_len = PAD, N
            backend = backend_on(
                checkpoint,
                tmp_path_factory.mktemp("w"),
                server.url,
                decode=decode,
                vocab_len=VOCAB_LEN,
                pads=PADS,
            )
            async with serving(backend):
                with trio.fail_after(20):
                    try:
                        await backend.generate(attempt(*prefix, images=(FIRST,) * n_images, max_new_tokens=2))
                    except PromptRefused:
                        assert 89 in prefix
                    else:
                        assert 89 not in prefix

    trio.run(one)
