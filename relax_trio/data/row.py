"""What one dataset row must hold, and the `TaskInput` that is made of it."""

from __future__ import annotations

import math
from pathlib import Path

from attrs import frozen

from relax_trio.config.nearest import did_you_mean
from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.messages import Message
from relax_trio.data.normalize import normalize_messages
from relax_trio.data.row_images import image_urls, place_images
from relax_trio.data.task import TaskInput
from relax_trio.errors import ConfigError, InvalidRequest

_MAX_DEPTH = 100


@frozen(kw_only=True)
class RowKeys:
    """Under which keys a row holds its parts.

    Attributes:
      label_key: None: rows have no label.
      image_key: of the images that the prompt has placeholders for; None: a prompt is taken as it is.
      directory: where the dataset's file is, for paths of images.
    """

    input_key: str
    label_key: str | None
    metadata_key: str
    image_key: str | None = None
    directory: Path = Path()


def make_task(row: int, source: str, content: JsonValue, keys: RowKeys) -> TaskInput:
    """Check one row.

    Args:
      row: its index in the dataset, after the slice.
      source: where it stands, "FILE:LINE".
      content: as read; values that JSON does not have are refused here.

    Raises:
      ConfigError: names `source`, the key, and the key that may have been meant.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: must be a JSON object, not {_kind(content)}")
    metadata = _metadata(source, content, keys)
    prompt = content.get(keys.input_key)
    if prompt is None and not metadata:
        raise ConfigError(f"{source}: has no {keys.input_key}{_hint(keys.input_key, content)}")
    messages = () if prompt is None else _messages(source, prompt, keys.input_key)
    if keys.image_key is not None:
        urls = image_urls(source, keys.image_key, content.get(keys.image_key), keys.directory)
        messages = place_images(source, keys.input_key, messages, keys.image_key, urls)
    return TaskInput(
        row=row,
        source=source,
        prompt=prompt,
        messages=messages,
        label=_label(source, content, keys),
        metadata=metadata,
    )


def _metadata(source: str, content: JsonObject, keys: RowKeys) -> JsonObject:
    metadata = content.get(keys.metadata_key)
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise ConfigError(f"{source}: {keys.metadata_key} must be an object, not {_kind(metadata)}")
    _refuse_foreign(source, keys.metadata_key, metadata)
    return metadata


def _label(source: str, content: JsonObject, keys: RowKeys) -> JsonValue:
    if keys.label_key is None:
        return None
    if keys.label_key not in content:
        raise ConfigError(f"{source}: has no {keys.label_key} for the label{_hint(keys.label_key, content)}")
    label = content[keys.label_key]
    _refuse_foreign(source, keys.label_key, label)
    return label


def _messages(source: str, prompt: JsonValue, key: str) -> tuple[Message, ...]:
    if not isinstance(prompt, str | list):
        raise ConfigError(f"{source}: {key} must be a string or a message list, not {_kind(prompt)}")
    if not prompt:
        raise ConfigError(f"{source}: {key} is empty")
    _refuse_foreign(source, key, prompt)
    messages: JsonValue = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        return normalize_messages(messages, param=key)
    except InvalidRequest as exc:
        raise ConfigError(f"{source}: {exc.message}") from exc


def _refuse_foreign(source: str, path: str, value: object) -> None:
    """Refuse what a file can hold and `session_input.json` cannot: NaN, dates, bytes, half characters, deep nesting."""
    rest: list[tuple[str, object, int]] = [(path, value, 0)]
    while rest:
        where, item, depth = rest.pop()
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{source}: {path} is nested more than {_MAX_DEPTH} deep")
        if isinstance(item, list):
            rest += ((f"{where}[{index}]", inner, depth + 1) for index, inner in enumerate(item))
        elif isinstance(item, dict):
            rest += ((f"{where}.{key}", inner, depth + 1) for key, inner in item.items())
            rest += ((f"a key of {where}", key, depth + 1) for key in item)
        elif wrong := _foreign(item):
            raise ConfigError(f"{source}: {where} is {wrong}")


def _foreign(item: object) -> str | None:
    if isinstance(item, float):
        return None if math.isfinite(item) else f"{item}, which JSON does not have; use null"
    if isinstance(item, str):
        return None if item.isascii() or _encodable(item) else "a text with half a surrogate pair in it"
    if item is None or isinstance(item, int):
        return None
    return f"a {type(item).__name__}, which JSON does not have; store it as text"


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _hint(key: str, content: JsonObject) -> str:
    if not content:
        return " (the row is empty)"
    return f" (its keys: {', '.join(content)}){did_you_mean(key, content)}"


def _kind(value: object) -> str:
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
