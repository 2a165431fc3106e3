"""Images on a real SGLang server on the CPU: what it reads is what was meant, and its logprobs are the model's."""

from __future__ import annotations

import json

import pytest
import trio
from attrs import evolve
from builders_backend import make_attempt, serving
from builders_commands import command, run
from builders_sglang import RealServer, backend_on, require_sglang
from builders_vision import (
    MODEL_VOCAB_LEN,
    ask,
    open_vision_session,
    picture,
    plain_logprobs,
    save_vision_checkpoint,
    shown,
    vision_model,
)
from safetensors.torch import load_file
from sglang_agreement import dumps

from relax_trio.backend.base import WeightSource
from relax_trio.data.messages import ImagePart, Message
from relax_trio.data.record import SessionOutput
from relax_trio.errors import InvalidRequest
from relax_trio.forest.export import export_contexts
from relax_trio.tokens.codec import ChatCodec
from relax_trio.train.recompute import logprob_gap, recompute_logprobs

pytestmark = [pytest.mark.engine, pytest.mark.sglang_server]

START_S = 300.0
ATOL = 2e-3
FIRST, SECOND = picture(90, 61), picture(40, 150, seed=1)
"""Of odd sizes, so that either is made larger or smaller on its way."""


@pytest.fixture(scope="module")
def vision_server(tmp_path_factory):
    """A checkpoint with vision, its codec, and the URL of a real server that began with it."""
    require_sglang()
    directory = tmp_path_factory.mktemp("images")
    checkpoint = save_vision_checkpoint(directory / "model")
    server = RealServer(checkpoint, directory / "server.log")
    codec = ChatCodec.load(checkpoint, reasoning_parser=None, tool_call_parser=None)
    yield checkpoint, codec, server.url
    server.stop()


@pytest.fixture
def codec(vision_server):
    return vision_server[1]


@pytest.fixture
def make(vision_server, tmp_path):
    checkpoint, codec, url = vision_server

    def make(**options):
        options = {"vocab_len": MODEL_VOCAB_LEN, "pads": codec.vision.pads, **options}
        # A server that sees its first image does nothing else for many seconds.
        times = {"start_timeout_s": START_S, "health_timeout_s": START_S}
        return backend_on(checkpoint, tmp_path, url, decode=codec.decode, **times, **options)

    return make


def encoded(codec, *messages):
    """Prompt and images of a conversation, as a Session makes them."""
    images = tuple(codec.vision.encode(part.url) for m in messages for part in m.content if isinstance(part, ImagePart))
    return codec.encode_opening(messages, (), {}, images=images), images


def worst(model, codec, prefix, result, images):
    """Largest difference of a logprob to that of the plain model."""
    plain = plain_logprobs(model, [*prefix, *result.token_ids], images, forbidden=codec.vision.pads.ids)
    return max(abs(a - b) for a, b in zip(plain[len(prefix) - 1 :], result.logprobs, strict=True))


async def test_turns_with_images_have_the_logprobs_of_the_plain_model(make, codec):
    async with open_vision_session(make(), codec) as session:
        conversation = [shown(FIRST)]
        for following in (shown(SECOND, "and this?"), Message(role="user", content="so?"), None):
            completion = await ask(session, *conversation)
            conversation += [completion.message, following]
        (context,) = export_contexts(session.forest, SessionOutput(metadata={}), dedup_shared_turns=False)
    pads = codec.vision.pads
    plain = plain_logprobs(vision_model(), context.tokens, [FIRST, SECOND], forbidden=pads.ids)
    response = plain[context.prompt_len - 1 :]
    assert len(context.turn_lens) == 3
    assert sum(image.n_tokens for image in context.images) == context.tokens.count(pads.image_id) > 2
    assert not {*pads.ids}.intersection(
        token for token, trained in zip(context.tokens[context.prompt_len :], context.loss_mask, strict=True) if trained
    )
    gaps = [abs(a - b) for a, b, trained in zip(response, context.logprobs, context.loss_mask, strict=True) if trained]
    assert max(gaps) < ATOL


async def test_an_attempt_with_an_image_goes_on_where_it_was_aborted(make, codec):
    prefix, images = encoded(codec, shown(FIRST))
    async with serving(make()) as backend:
        attempt = evolve(make_attempt(prefix, max_new_tokens=600), images=images)
        results = []

        async def fly():
            results.append(await backend.generate(attempt))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fly)
            await backend.generate(make_attempt([3], session="pace", max_new_tokens=6))
            await backend.abort(attempt.rid)
        (aborted,) = results
        longer = prefix + aborted.token_ids
        resumed = await backend.generate(evolve(make_attempt(longer, max_new_tokens=8), images=images))
    assert aborted.finish == "abort"
    assert len(aborted.token_ids) > 0
    assert worst(vision_model(), codec, prefix, aborted, [FIRST]) < ATOL
    assert worst(vision_model(), codec, longer, resumed, [FIRST]) < ATOL


@pytest.mark.parametrize("text", ["is <image> one?", "<|image_pad|>", "<|vision_start|><|video_pad|><|vision_end|>"])
async def test_what_a_server_takes_for_an_image_is_refused_before_it_hangs(make, codec, text):
    async with open_vision_session(make(), codec) as session:
        with pytest.raises(InvalidRequest, match="image"):
            await ask(session, shown(FIRST, text))
        assert (await ask(session, shown(FIRST))).usage.completion_tokens > 0


@pytest.mark.parametrize("transfer", ["disk", "tensor"])
async def test_new_weights_are_served_to_images_too(make, codec, transfer, tmp_path):
    model = vision_model(seed=1)
    tensors = load_file(save_vision_checkpoint(tmp_path / "v2", seed=1) / "model.safetensors")
    prefix, images = encoded(codec, shown(FIRST), shown(SECOND))
    async with serving(make(transfer=transfer)) as backend:
        await backend.update_weights("v2", WeightSource(tensors=tensors))
        result = await backend.generate(evolve(make_attempt(prefix, max_new_tokens=8), images=images))
    assert [span.version for span in result.versions] == ["v2"]
    assert worst(model, codec, prefix, result, [FIRST, SECOND]) < ATOL


def test_a_run_over_a_dataset_with_images_trains_on_what_its_agents_were_shown(vision_server, tmp_path):
    checkpoint, _, url = vision_server
    FIRST.save(tmp_path / "first.png")
    rows = [
        {
            "input": [{"role": "user", "content": f"<image>{i}" if i % 2 else f"{i}"}],
            "images": ["first.png"] if i % 2 else [],
            "metadata": {"row": i},
        }
        for i in range(4)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = command("train", checkpoint, data, tmp_path / "run", "--num-rollout", "2", "--lr", "1e-3")
    words += [
        "--multimodal-keys",
        '{"image":"images"}',
        "--rollout-max-context-len",
        "400",
        "--save",
        str(tmp_path / "s"),
        "--save-interval",
        "1",
    ]
    words += ["--rollout-backend", "sglang", "--sglang-server", url, "--engine-health-timeout", str(START_S)]
    words += [
        "--agent-env",
        "TURNS=2",
        "--save-debug-rollout-data",
        str(tmp_path / "run" / "samples-{rollout_id}.jsonl"),
    ]
    done = run(words, within_s=300)
    assert done.returncode == 0, done.stderr[-4000:]

    first, second = dumps(tmp_path / "run")
    for dump, source in ((first, checkpoint), (second, tmp_path / "s" / "step_000001")):
        rows_with = [sample for sample in dump.samples if sample.images]
        assert len(dump.samples) == 2 * len(rows_with) == 4
        assert all(sample.prompt[0]["content"].startswith("<image>") for sample in rows_with)
        logprobs = recompute_logprobs(source, dump.samples, temperature=1.0)
        assert logprob_gap(dump.samples, logprobs) < ATOL
