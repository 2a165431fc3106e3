"""Images and their placeholders: how many tokens an image is, what is sent of it, and texts that look like one."""

from __future__ import annotations

import io
from array import array

import numpy as np
import pytest
from builders_vision import (
    QWEN_VL_TEMPLATE,
    data_url,
    picture,
    save_vision_checkpoint,
    shown,
    vision_processor,
    vision_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from relax_trio.data.image import EncodedImage
from relax_trio.data.messages import ImagePart, Message, TextPart, ToolCall
from relax_trio.errors import ConfigError, EngineFault, InvalidRequest, UnsupportedFeature
from relax_trio.tokens.codec import ChatCodec
from relax_trio.tokens.pads import Pads, image_urls
from relax_trio.tokens.vision import MAX_PIXELS, load_vision, open_image, read_data_url

PAD, VIDEO = 7, 8
PADS = Pads(image_id=PAD, texts={PAD: "<pad>", VIDEO: "<video>"})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_vision_checkpoint(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def codec(checkpoint):
    return ChatCodec.load(checkpoint, reasoning_parser=None, tool_call_parser=None)


def encode(codec, *messages, **kwargs):
    """Prompt and images of a conversation."""
    images = tuple(codec.vision.encode(url) for url in image_urls(messages))
    return codec.encode_opening(messages, (), kwargs, images=images), images


def sized(*lens):
    return tuple(EncodedImage(url=f"data:{n}", n_tokens=n) for n in lens)


# --- placeholders ------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.integers(0, 6), st.just(PAD)), max_size=20), st.data())
def test_what_was_expanded_contracts_to_what_it_was(ids, data):
    images = sized(*(data.draw(st.integers(1, 5)) for _ in range(ids.count(PAD))))

    expanded = PADS.expand(ids, images)

    assert expanded.count(PAD) == sum(image.n_tokens for image in images)
    assert [token for token in expanded if token != PAD] == [token for token in ids if token != PAD]
    assert PADS.contract(expanded, images) == array("i", ids)


@pytest.mark.parametrize(("ids", "n_images"), [([1, PAD], 0), ([1], 1), ([PAD, 2, PAD], 1), ([VIDEO], 0)])
def test_a_placeholder_without_an_image_and_an_image_without_one_are_refused(ids, n_images):
    with pytest.raises(InvalidRequest, match=f"for the {n_images} images"):
        PADS.expand(ids, sized(*[2] * n_images))


@pytest.mark.parametrize("ids", [[PAD], [PAD, PAD, PAD], [PAD, 1, PAD], [1], [PAD, PAD, VIDEO]])
def test_placeholders_that_are_not_those_of_the_images_are_our_own_mistake(ids):
    with pytest.raises(EngineFault):
        PADS.contract(array("i", ids), sized(2))


@pytest.mark.parametrize(
    ("message", "tools", "kwargs"),
    [
        (Message(role="user", content="a <pad> b"), (), {}),
        (Message(role="user", content=(TextPart("<video>"), ImagePart("data:"))), (), {}),
        (Message(role="assistant", reasoning_content="<pad>"), (), {}),
        (Message(role="assistant", tool_calls=(ToolCall(id="c", name="f", arguments='{"a":"<pad>"}'),)), (), {}),
        (Message(role="user", content="a"), ({"type": "function", "function": {"name": "<pad>"}},), {}),
        (Message(role="user", content="a"), (), {"note": "<pad>"}),
    ],
)
def test_a_placeholder_that_somebody_wrote_is_refused(message, tools, kwargs):
    with pytest.raises(InvalidRequest, match="stands for an image or a video"):
        PADS.refuse_written([message], tools, kwargs)


# --- a checkpoint's images -----------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(8, 300), st.integers(8, 300), st.integers(0, 3))
def test_an_encoded_image_is_what_the_processor_makes_of_the_original(codec, width, height, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)

    encoded = codec.vision.encode(data_url(image))

    theirs = vision_processor()(images=[image], return_tensors="pt")
    ours = codec.vision.inputs([encoded])
    assert (ours["image_grid_thw"] == theirs["image_grid_thw"]).all()
    assert (ours["pixel_values"] == theirs["pixel_values"]).all()
    assert encoded.n_tokens == int(theirs["image_grid_thw"].prod()) // 4
    assert codec.vision.encode(encoded.url) == encoded


def test_a_prompt_holds_the_placeholders_of_each_image_where_the_template_prints_it(codec):
    first, second = picture(56, 56), picture(112, 84, seed=1)
    ids, images = encode(codec, shown(first), Message(role="assistant", content="a"), shown(second, "b"))

    text = codec.decode(codec.vision.pads.contract(ids, images))
    assert [image.n_tokens for image in images] == [4, 12]
    assert ids.count(codec.vision.pads.image_id) == 16
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what is it?<|im_end|>\n"
        "<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>b<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("kwargs", [{}, {"add_vision_id": True}], ids=["plain", "numbered"])
def test_what_is_encoded_behind_a_turn_is_what_the_template_prints_there(codec, kwargs):
    first, turn = shown(picture(56, 56)), Message(role="assistant", content="an a")
    second = shown(picture(112, 84, seed=1), "b", role="tool", tool_call_id="c")
    opening, _ = encode(codec, first, **kwargs)
    turn_ids = array("i", codec.encode_text("an a<|im_end|>"))

    more = tuple(codec.vision.encode(url) for url in image_urls([second]))
    tail = codec.encode_observation([second], (), kwargs, turn=turn, turn_ids=turn_ids, earlier=[first], images=more)

    whole, _ = encode(codec, first, turn, second, **kwargs)
    assert opening + turn_ids + tail == whole


@pytest.mark.parametrize("text", ["<|image_pad|>", "a<|vision_start|><|image_pad|><|vision_end|>", "<|video_pad|>"])
def test_a_placeholder_in_a_text_is_refused_with_an_image_and_without(codec, text):
    for message in (Message(role="user", content=text), shown(picture(), text)):
        with pytest.raises(InvalidRequest, match="stands for an image or a video"):
            encode(codec, message)
    with pytest.raises(InvalidRequest, match="stands for an image or a video"):
        codec.encode_prefill(text, {})


def test_an_image_that_the_template_does_not_print_is_refused(codec):
    tokenizer = vision_tokenizer()
    tokenizer.chat_template = QWEN_VL_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "")
    blind = ChatCodec.from_tokenizer(tokenizer, vision=codec.vision)
    with pytest.raises(InvalidRequest, match="prints 0 placeholders for the 1 images"):
        encode(blind, shown(picture()))


# --- reading images ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_every_known_format_is_read_as_rgb(kind, mode):
    if kind == "JPEG" and mode in ("RGBA", "P"):
        return
    opened = open_image(read_data_url(data_url(picture().convert(mode), kind)))

    assert (opened.mode, opened.size) == ("RGB", (84, 56))


def test_a_photograph_is_turned_as_it_was_taken():
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    picture(84, 56).save(buffer, "JPEG", exif=exif)

    assert open_image(buffer.getvalue()).size == (56, 84)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png;base64,AAAA", "unknown format"),
        ("data:image/png;base64,A", "holds no base64"),
        ("data:image/png;base64,", "unknown format"),
        ("data:image/png", "send the image itself as data:"),
        ("file:///etc/passwd", "send the image itself as data:"),
        (data_url(Image.new("1", (9000, 9000))), "pixels are too many"),
        (data_url(picture())[:-40], "can't be read"),
        (data_url(Image.new("RGB", (3, 900))), "aspect ratio"),
        ("data:application/postscript;base64,JSFQUy1BZG9iZS0zLjAgRVBTRi0zLjAK", "unknown format"),
    ],
)
def test_what_is_no_image_that_can_be_served_is_refused_with_its_reason(codec, url, why):
    assert MAX_PIXELS < 9000 * 9000
    with pytest.raises(InvalidRequest, match=why):
        codec.vision.encode(url)


@given(st.binary(max_size=200), st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM"]))
def test_no_bytes_do_anything_but_open_or_be_refused(data, magic):
    try:
        open_image(magic + data)
    except InvalidRequest:
        pass


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_damage_to_an_image_does_anything_but_open_or_be_refused(data):
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]))
    whole = bytearray(read_data_url(data_url(picture(42, 42), kind)))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        open_image(bytes(whole[: data.draw(st.integers(1, len(whole)))]))
    except InvalidRequest:
        pass


# --- checkpoints ---------------------------------------------------------------------------------------------------


def test_a_text_checkpoint_says_so(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')

    vision = load_vision(tmp_path, vision_tokenizer())

    assert vision.pads is None
    with pytest.raises(UnsupportedFeature, match="this checkpoint takes no images"):
        vision.encode(data_url(picture()))


def test_a_checkpoint_of_another_kind_is_served_as_text_and_says_why(tmp_path):
    (tmp_path / "config.json").write_text('{"vision_config": {}, "image_token_id": 514}')
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Gemma3ImageProcessor"}')

    with pytest.raises(UnsupportedFeature, match="that of this one is Gemma3ImageProcessor"):
        load_vision(tmp_path, vision_tokenizer()).encode(data_url(picture()))


def test_a_processor_inside_the_common_file_is_found(checkpoint, tmp_path):
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    own = (checkpoint / "preprocessor_config.json").read_text()
    (tmp_path / "processor_config.json").write_text(f'{{"image_processor": {own}}}')

    assert load_vision(tmp_path, vision_tokenizer()).max_pixels == 28 * 28 * 16


def test_the_bounds_of_older_files_are_read(checkpoint, tmp_path):
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (tmp_path / "preprocessor_config.json").write_text(
        '{"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, '
        '"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}'
    )
    vision = load_vision(tmp_path, vision_tokenizer())

    assert (vision.min_pixels, vision.max_pixels) == (3136, 12845056)


def test_a_placeholder_outside_the_vocabulary_is_an_error_at_the_start(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text('{"vision_config": {}, "image_token_id": 100000}')
    (tmp_path / "preprocessor_config.json").write_bytes((checkpoint / "preprocessor_config.json").read_bytes())

    with pytest.raises(ConfigError, match="no image_token_id of the tokenizer's"):
        load_vision(tmp_path, vision_tokenizer())
