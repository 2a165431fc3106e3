"""The images of a task as an agent process is given them: URLs that hold the image, or that it can fetch itself."""

from __future__ import annotations

import functools
from pathlib import Path
from urllib.parse import unquote, urlsplit

from attrs import evolve

from relax_trio.data.json import JsonObject
from relax_trio.data.messages import ImagePart, Message, Part
from relax_trio.data.row_images import is_portable
from relax_trio.data.task import TaskInput
from relax_trio.errors import AgentLaunchError, InvalidRequest, boundary
from relax_trio.tokens.vision import open_image, png_url, read_data_url

_REMEMBERED = 64
"""Images whose PNG is kept: all Sessions of a Group are given the same ones."""


def has_local_images(task: TaskInput) -> bool:
    """Whether `session_input` has images to read."""
    return any(not is_portable(part.url) for message in task.messages for part in _images(message))


def session_input(task: TaskInput) -> JsonObject:
    """Content of `session_input.json`, with files and byte payloads as RGB PNG in data: URLs. Blocking.

    Raises:
      AgentLaunchError: an image can't be read; names the row.
    """
    return evolve(task, messages=tuple(_portable(message, task.source) for message in task.messages)).session_input()


def _images(message: Message) -> tuple[ImagePart, ...]:
    parts = message.content if isinstance(message.content, tuple) else ()
    return tuple(part for part in parts if isinstance(part, ImagePart))


def _portable(message: Message, source: str) -> Message:
    if not isinstance(message.content, tuple):
        return message
    return evolve(message, content=tuple(_portable_part(part, source) for part in message.content))


def _portable_part(part: Part, source: str) -> Part:
    if not isinstance(part, ImagePart) or is_portable(part.url):
        return part
    try:
        with boundary(AgentLaunchError, f"row {source}: an image can't be read", OSError):
            return ImagePart(_png(part.url))
    except InvalidRequest as exc:
        shown = part.url if part.url.startswith("file:") else "an image among its bytes"
        raise AgentLaunchError(f"row {source}: {shown}: {exc.message}") from exc


@functools.lru_cache(maxsize=_REMEMBERED)
def _png(url: str) -> str:
    if url.startswith("file:"):
        return png_url(open_image(Path(unquote(urlsplit(url).path)).read_bytes()))
    return png_url(open_image(read_data_url(url)))
