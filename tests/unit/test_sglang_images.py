"""Prompts with images as an SGLang server is sent them, and what of its answers is believed."""

from __future__ import annotations

import json
from array import array

import pytest
from sglang_wire import DATA

from relax_trio.backend.base import SamplingParams
from relax_trio.backend.sglang.images import NO_IMAGES, ImagePrompts
from relax_trio.backend.sglang.wire import Leg, generate_body, read_leg
from relax_trio.data.image import EncodedImage
from relax_trio.errors import BackendProtocolError, BackendRejected, PromptRefused
from relax_trio.tokens.pads import Pads

PAD, VIDEO = 90, 91
PADS = Pads(image_id=PAD, texts={PAD: "<|image_pad|>", VIDEO: "<|video_pad|>"})
TEXTS = {1: "a", 2: "<", 3: "image>", 4: "<|image_", 5: "pad|>", 6: "<|video_pad|>", **PADS.texts}
IMAGES = (EncodedImage(url="data:one", n_tokens=2), EncodedImage(url="data:two", n_tokens=3))


def decode(ids):
    return "".join(TEXTS[token_id] for token_id in ids)


def prompts(version="1"):
    return ImagePrompts(PADS, decode, version=lambda: version)


def leg(*token_ids, prompt_len=None):
    n = len(token_ids)
    return Leg(
        token_ids=array("i", token_ids),
        logprobs=array("d", [0.0] * n),
        finish="length",
        versions=(),
        prompt_len=prompt_len,
    )


def test_each_image_is_sent_as_one_placeholder():
    ids = array("i", [1, PAD, PAD, 1, PAD, PAD, PAD, 1])

    assert prompts().wire_ids(ids, IMAGES, "a1") == array("i", [1, PAD, 1, PAD, 1])


@pytest.mark.parametrize("tail", [[2, 3], [4, 5], [6]], ids=decode)
def test_a_text_that_reads_as_a_placeholder_is_never_sent_with_an_image(tail):
    ids = array("i", [1, PAD, PAD, 1, PAD, PAD, PAD, *tail])

    with pytest.raises(PromptRefused, match="takes for the place of another one"):
        prompts().wire_ids(ids, IMAGES, "a1")


def test_a_backend_without_images_sends_none():
    with pytest.raises(BackendRejected, match="takes no images"):
        NO_IMAGES.wire_ids(array("i", [1]), IMAGES, "a1")
    assert NO_IMAGES.forbidden_ids == ()


def test_what_a_server_keeps_of_an_image_has_another_name_under_other_weights_and_in_another_run():
    version = ["1"]
    images = ImagePrompts(PADS, decode, version=lambda: version[0])

    before = images.wire_images(IMAGES)
    assert images.wire_images(IMAGES) == before
    version[0] = "2"
    keys = [one.key for sent in (before, images.wire_images(IMAGES), prompts().wire_images(IMAGES)) for one in sent]

    assert len(set(keys)) == 6
    assert all(0 <= int(key, 16) < 2**64 for key in keys)


def test_the_body_holds_images_and_forbids_placeholders():
    sampling = SamplingParams(max_new_tokens=4)
    images = prompts().wire_images(IMAGES)

    body = json.loads(
        generate_body("r", array("i", [1, PAD]), sampling, 4, images=images, forbidden_ids=prompts().forbidden_ids)
    )
    plain = json.loads(generate_body("r", array("i", [1]), sampling, 4))

    assert body["image_data"] == ["data:one", "data:two"]
    assert body["mm_hashes"] == [image.key for image in images]
    assert set(body["sampling_params"]["logit_bias"]) == {str(PAD), str(VIDEO)}
    assert max(body["sampling_params"]["logit_bias"].values()) <= -1e6
    assert not {"image_data", "mm_hashes"} & set(plain)
    assert "logit_bias" not in plain["sampling_params"]


@pytest.mark.parametrize(("prompt_len", "n_sent"), [(12, 11), (0, 1)])
def test_a_server_that_counts_otherwise_saw_another_image(prompt_len, n_sent):
    with pytest.raises(BackendProtocolError, match=f"read {prompt_len} prompt tokens where {n_sent} were meant"):
        prompts().check_answer(leg(1, prompt_len=prompt_len), n_sent, "a1")


@pytest.mark.parametrize(("prompt_len", "n_sent"), [(11, 11), (None, 11), (12, None)])
def test_an_answer_is_believed_where_the_count_is_right_or_there_is_none(prompt_len, n_sent):
    prompts().check_answer(leg(1, prompt_len=prompt_len), n_sent, "a1")


@pytest.mark.parametrize("token_id", [PAD, VIDEO])
@pytest.mark.parametrize("n_sent", [3, None])
def test_a_generated_placeholder_is_an_error_with_images_and_without(token_id, n_sent):
    with pytest.raises(BackendProtocolError, match=f"generated token {token_id}"):
        prompts().check_answer(leg(1, token_id, prompt_len=3), n_sent, "a1")


@pytest.mark.parametrize("version", ["0.5.15.post1", "0.5.23"])
def test_the_count_of_a_recorded_answer_is_read_and_a_queued_one_has_none(version):
    response = json.loads((DATA / version / "01_generate_ids_rid.json").read_text())["response"]
    answer = json.loads(response["body"])

    assert read_leg(200, response["body"].encode(), "a1").prompt_len == answer["meta_info"]["prompt_tokens"]
    del answer["meta_info"]["prompt_tokens"]
    assert read_leg(200, json.dumps(answer).encode(), "a1").prompt_len is None
