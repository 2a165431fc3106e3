"""Images in the three model APIs: one conversation, the same tokens and pixels, whatever the dialect."""

from __future__ import annotations

import json

import pytest
from builders_served import body_of, open_served, status_of
from builders_vision import data_url, picture, save_vision_checkpoint

from relax_trio.tokens.codec import ChatCodec

FIRST, SECOND = data_url(picture(84, 56)), data_url(picture(56, 112, seed=1), "JPEG")
N_FIRST, N_SECOND = 6, 8
"""Placeholders of each."""


def base64_of(url):
    media_type, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "base64", "media_type": media_type, "data": data}


def chat(*turns):
    messages = []
    for text, image, answer in turns:
        content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": text}]
        messages += [
            {"role": "user", "content": content},
            *([{"role": "assistant", "content": answer}] if answer else []),
        ]
    return "/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 8}


def responses(*turns):
    items = []
    for text, image, answer in turns:
        content = [{"type": "input_image", "image_url": image}, {"type": "input_text", "text": text}]
        items += [{"role": "user", "content": content}, *([{"role": "assistant", "content": answer}] if answer else [])]
    return "/v1/responses", {"model": "m", "input": items, "max_output_tokens": 8}


def messages(*turns):
    said = []
    for text, image, answer in turns:
        content = [{"type": "image", "source": base64_of(image)}, {"type": "text", "text": text}]
        said += [{"role": "user", "content": content}, *([{"role": "assistant", "content": answer}] if answer else [])]
    return "/v1/messages", {"model": "m", "messages": said, "max_tokens": 8}


DIALECTS = [chat, responses, messages]


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return ChatCodec.load(
        save_vision_checkpoint(tmp_path_factory.mktemp("vision")), reasoning_parser=None, tool_call_parser=None
    )


async def post(served, path, body):
    reply = await served.ask(path, json.dumps(body).encode())
    return status_of(reply), json.loads(body_of(reply))


async def test_a_conversation_with_images_has_the_same_tokens_in_every_dialect(loopback_clock, codec):
    async with open_served(["one", "two"] * 3, codec=codec, tokens_per_s=float("inf")) as served:
        for number, dialect in enumerate(DIALECTS):
            status, _ = await post(served, *dialect(("what?", FIRST, None)))
            assert status == 200
            answer = ["one", "two"][number % 2]
            status, _ = await post(served, *dialect(("what?", FIRST, answer), ("and?", SECOND, None)))
            assert status == 200
        attempts = served.backend.attempts
    firsts, seconds = attempts[::2], attempts[1::2]
    pad = codec.vision.pads.image_id
    assert [[image.n_tokens for image in attempt.images] for attempt in seconds] == [[N_FIRST, N_SECOND]] * 3
    assert {attempt.token_ids.tobytes() for attempt in firsts} == {firsts[0].token_ids.tobytes()}
    assert len({attempt.images for attempt in seconds}) == 1
    assert firsts[0].token_ids.count(pad) == N_FIRST
    assert seconds[0].token_ids.count(pad) == N_FIRST + N_SECOND


async def test_usage_and_counts_hold_every_placeholder(loopback_clock, codec):
    path, body = messages(("what?", FIRST, None))
    async with open_served(["one"], codec=codec, tokens_per_s=float("inf")) as served:
        _, counted = await post(served, "/v1/messages/count_tokens", {"model": "m", "messages": body["messages"]})
        assert served.n_generated == 0
        _, reply = await post(served, path, body)
    (attempt,) = served.backend.attempts
    assert counted["input_tokens"] == len(attempt.token_ids)
    assert reply["usage"]["input_tokens"] == len(attempt.token_ids)


TOOL_RESULTS = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "look"},
                {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": FIRST}]},
            ]
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "look"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image", "image_url": FIRST}],
                },
            ]
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 8,
            "messages": [
                {"role": "user", "content": "look"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [{"type": "image", "source": base64_of(FIRST)}],
                        }
                    ],
                },
            ],
        },
    ),
]


async def test_a_tool_result_shows_its_image_in_every_dialect(loopback_clock, codec):
    async with open_served(["one"] * 3, codec=codec, tokens_per_s=float("inf")) as served:
        for path, body in TOOL_RESULTS:
            status, reply = await post(served, path, body)
            assert status == 200, reply
        attempts = served.backend.attempts
    assert [len(attempt.images) for attempt in attempts] == [1, 1, 1]
    assert len({attempt.token_ids.tobytes() for attempt in attempts}) == 1


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("text", "image", "why"),
    [
        ("what?", "data:image/png;base64,AAAA", "image 1 of the newest 1 messages: its 3 bytes can't be read"),
        ("<|image_pad|>", FIRST, "stands for an image or a video in this model's prompts"),
    ],
)
async def test_what_can_not_be_served_is_a_400_that_says_why(loopback_clock, codec, dialect, text, image, why):
    async with open_served(["one"], codec=codec) as served:
        status, reply = await post(served, *dialect((text, image, None)))
        assert (status, why in reply["error"]["message"]) == (400, True), reply
        assert served.n_generated == 0
        assert served.kinds == ["root"]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_text_checkpoint_refuses_an_image_and_says_why(loopback_clock, dialect):
    async with open_served(["one"]) as served:
        status, reply = await post(served, *dialect(("what?", FIRST, None)))
    assert status == 400
    assert "this checkpoint takes no images; send text content only" in reply["error"]["message"]


async def test_another_image_is_another_conversation(loopback_clock, codec):
    async with open_served(["one", "one"], codec=codec, tokens_per_s=float("inf")) as served:
        for image in (FIRST, SECOND):
            await post(served, *chat(("what?", image, None)))
        assert served.kinds == ["root", "observation", "response", "observation", "response"]
