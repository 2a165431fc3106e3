"""Images of a dataset: placeholders and images meet, and an agent is given URLs that hold them."""

from __future__ import annotations

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders_vision import data_url, picture
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageChops

from relax_trio.agent.task_images import has_local_images, session_input
from relax_trio.config.parse import parse_config
from relax_trio.data.dataset import load_dataset
from relax_trio.data.messages import ImagePart, Message, TextPart
from relax_trio.data.row_images import place_images
from relax_trio.errors import AgentLaunchError, ConfigError
from relax_trio.tokens.vision import open_image, read_data_url

URL = "https://example.org/a.png"


def image_bytes(image, kind="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def load_lines(tmp_path, *rows, **keys):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_dataset(str(path), image_key="images", **keys).rows


def given_images(task):
    """What the agent is given in the place of each image, decoded."""
    content = [part for message in session_input(task)["messages"] for part in message["content"]]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    return [open_image(read_data_url(url)) for url in urls]


def test_an_image_stands_where_its_placeholder_was(tmp_path):
    picture().save(tmp_path / "a.png")
    (task,) = load_lines(tmp_path, {"input": "See <image>, then <image>!", "images": ["a.png", URL]})

    (message,) = task.messages
    path = (tmp_path / "a.png").as_uri()
    assert message.content == (
        TextPart("See "), ImagePart(path), TextPart(", then "), ImagePart(URL), TextPart("!"),
    )  # fmt: skip
    assert task.prompt == "See <image>, then <image>!"


def test_a_local_file_is_given_as_an_rgb_png(tmp_path):
    picture().convert("RGBA").save(tmp_path / "a b.webp", lossless=True)
    (task,) = load_lines(tmp_path, {"input": [{"role": "user", "content": "<image>What?"}], "images": ["a b.webp"]})

    assert has_local_images(task)
    (image,) = given_images(task)
    assert ImageChops.difference(image, picture()).getbbox() is None
    assert session_input(task)["messages"][0]["content"][1] == {"type": "text", "text": "What?"}


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: {"bytes": data, "path": None}], ids=["bytes", "hf"])
def test_a_byte_payload_of_a_table_is_given_as_a_png(tmp_path, wrap):
    data = image_bytes(picture(seed=3), "BMP")
    rows = [{"input": "<image>", "images": [wrap(data)], "extra": 1}, {"input": "no image", "images": None, "extra": 2}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")

    first, second = load_dataset(str(tmp_path / "d.parquet"), image_key="images").rows

    (image,) = given_images(first)
    assert ImageChops.difference(image, picture(seed=3)).getbbox() is None
    assert second.messages == (Message(role="user", content="no image"),)
    assert not has_local_images(second)


@pytest.mark.parametrize("url", [URL, "http://127.0.0.1/x", data_url(picture(14, 14), "JPEG")])
def test_a_url_is_kept(tmp_path, url):
    (task,) = load_lines(tmp_path, {"input": "<image>", "images": url})

    assert not has_local_images(task)
    assert task.session_input()["messages"][0]["content"] == [{"type": "image_url", "image_url": {"url": url}}]
    assert session_input(task) == task.session_input()


PIECES = st.lists(st.sampled_from(["<image>", "a", "<", "image>", " "]), max_size=6).map("".join)


@given(st.lists(PIECES, min_size=1, max_size=4))
def test_each_image_takes_the_place_of_one_placeholder_in_order(texts):
    messages = [Message(role="user", content=text) for text in texts]
    urls = [f"data:image/png,{n}" for n in range(sum(text.count("<image>") for text in texts))]

    placed = place_images("d:1", "input", messages, "images", urls)

    seen = [
        part.url for m in placed if isinstance(m.content, tuple) for part in m.content if isinstance(part, ImagePart)
    ]
    assert seen == urls
    for message, text in zip(placed, texts, strict=True):
        parts = message.content if isinstance(message.content, tuple) else (TextPart(message.content),)
        assert "".join("<image>" if isinstance(part, ImagePart) else part.text for part in parts) == text


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"input": "<image>", "images": []}, r"d.jsonl:1: input has 1 times <image>, but images holds 0 images"),
        ({"input": "<image>"}, "holds 0 images"),
        ({"input": "none", "images": [URL]}, "has 0 times <image>, but images holds 1 images; write one <image>"),
        ({"input": "<image><image>", "images": [URL]}, "has 2 times"),
        ({"input": "<image>", "images": ["no.png"]}, r"d.jsonl:1: images\[0\]: there is no file no.png"),
        ({"input": "<image>", "images": [3]}, r"images\[0\] is of type int; give a path, a URL, bytes"),
        ({"input": "<image>", "images": [""]}, r"images\[0\] is empty"),
        ({"input": "<image>", "images": [{"url": "x"}]}, r"images\[0\] is empty"),
        (
            {"input": [{"role": "system", "content": "<image>"}, {"role": "user", "content": "a"}], "images": [URL]},
            "a system message of input holds <image>",
        ),
    ],
)
def test_a_row_whose_images_do_not_fit_is_named(tmp_path, row, why):
    with pytest.raises(ConfigError, match=why):
        load_lines(tmp_path, row)


def test_a_file_that_is_no_image_fails_the_start_of_its_agents_by_name(tmp_path):
    (tmp_path / "a.png").write_text("no image")
    (task,) = load_lines(tmp_path, {"input": "<image>", "images": ["a.png"]})

    with pytest.raises(AgentLaunchError, match=r"d\.jsonl:1: file://.*a\.png: its 8 bytes can't be read"):
        session_input(task)
    (tmp_path / "a.png").unlink()
    with pytest.raises(AgentLaunchError, match=r"d\.jsonl:1: an image can't be read: FileNotFoundError"):
        session_input(task)


def test_a_table_without_the_column_is_refused(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"input": "a", "image": None}]), tmp_path / "d.parquet")

    with pytest.raises(ConfigError, match=r"has no column images for the images .*image"):
        load_dataset(str(tmp_path / "d.parquet"), image_key="images")


def test_without_the_flag_a_placeholder_is_text(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"input": "<image>", "images": ["x"]}\n')

    assert load_dataset(str(path)).rows[0].messages == (Message(role="user", content="<image>"),)


def test_the_flag_names_the_key():
    assert parse_config(["--multimodal-keys", '{"image": "pictures"}']).config.data.image_key == "pictures"
    assert parse_config([]).config.data.image_key is None


@pytest.mark.parametrize(
    "value", ["images", "{}", '{"video": "v"}', '{"image": "a", "video": "v"}', '{"image": ""}', "[1]"]
)
def test_another_value_of_the_flag_is_refused(value):
    with pytest.raises(ConfigError, match=r"--multimodal-keys: must be a JSON object such as"):
        parse_config(["--multimodal-keys", value])


def test_an_image_of_another_mode_is_read(tmp_path):
    Image.new("L", (20, 30), 7).save(tmp_path / "a.png")
    (task,) = load_lines(tmp_path, {"input": "<image>", "images": ["a.png"]})

    (image,) = given_images(task)
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (20, 30), (7, 7, 7))
