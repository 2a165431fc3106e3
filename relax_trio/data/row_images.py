"""Images of a dataset row: put where its prompt has placeholders, as URLs.

A local file becomes a file: URL and a byte payload a data: URL of no image type; both are made into PNG when an agent
is given its task, not before. Not covered: whether they hold images.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from attrs import evolve

from relax_trio.data.messages import Content, ImagePart, Message, Part, TextPart
from relax_trio.errors import ConfigError

PLACEHOLDER: Final = "<image>"
BYTES_URL: Final = "data:application/octet-stream;base64,"
_KEPT: Final = ("data:image/", "http://", "https://")
_ROLES: Final = ("user", "tool")


def is_portable(url: str) -> bool:
    """Whether an agent is given the URL as it is."""
    return url.startswith(_KEPT)


def image_urls(source: str, key: str, value: object, directory: Path) -> tuple[str, ...]:
    """The images that a row holds under `key`, as URLs.

    Args:
      source: where the row stands, for errors.
      value: a list of images or one: a URL, a path, bytes, or a mapping with one of them under `bytes` or `path`; None
        for no image.
      directory: where the dataset's file is; relative paths begin there, or in the working directory.

    Raises:
      ConfigError: something else, or a file that is not there.
    """
    listed = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return tuple(_url(f"{source}: {key}[{index}]", item, directory) for index, item in enumerate(listed))


def place_images(
    source: str, key: str, messages: Sequence[Message], image_key: str, urls: Sequence[str]
) -> tuple[Message, ...]:
    """`messages` with each placeholder replaced by the next of `urls`.

    Raises:
      ConfigError: there are more or fewer of them, or one stands where no image can.
    """
    for message in messages:
        if message.role not in _ROLES and any(PLACEHOLDER in text for text in message.texts):
            raise ConfigError(
                f"{source}: a {message.role} message of {key} holds {PLACEHOLDER}, but images can stand in messages of "
                "the user and in tool results only"
            )
    n_places = sum(text.count(PLACEHOLDER) for message in messages for text in message.texts)
    if n_places != len(urls):
        raise ConfigError(
            f"{source}: {key} has {n_places} times {PLACEHOLDER}, but {image_key} holds {len(urls)} images; write one "
            f"{PLACEHOLDER} for each image, where the model is to see it"
        )
    left = iter(urls)
    return tuple(evolve(message, content=_placed(message.content, left)) for message in messages)


def _placed(content: Content, urls: Iterator[str]) -> Content:
    parts = (TextPart(content),) if isinstance(content, str) else content or ()
    if not any(isinstance(part, TextPart) and PLACEHOLDER in part.text for part in parts):
        return content
    placed: list[Part] = []
    for part in parts:
        if isinstance(part, ImagePart):
            placed.append(part)
            continue
        for index, text in enumerate(part.text.split(PLACEHOLDER)):
            placed += [ImagePart(next(urls))] if index else []
            placed += [TextPart(text)] if text else []
    return tuple(placed)


def _url(where: str, value: object, directory: Path) -> str:
    if isinstance(value, dict):
        value = next((value[name] for name in ("bytes", "path") if value.get(name) is not None), None)
    if isinstance(value, bytes | bytearray):
        return BYTES_URL + base64.b64encode(value).decode()
    if not isinstance(value, str) or not value:
        kind = "empty" if value in ("", None) else f"of type {type(value).__name__}"
        raise ConfigError(f"{where} is {kind}; give a path, a URL, bytes, or an object with one under bytes or path")
    if value.startswith(("data:", "http://", "https://")):
        return value
    path = Path(value.removeprefix("file://")).expanduser()
    for base in (directory, Path()):
        if (base / path).is_file():
            return (base / path).absolute().as_uri()
    raise ConfigError(f"{where}: there is no file {path} (in {directory}, nor in the working directory)")
