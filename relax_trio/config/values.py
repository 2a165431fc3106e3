"""What users write for a value, turned into the type that its option declares.

Owns both spellings: the words of a command line and the values of a YAML file. Each function raises ValueError with
what is wrong with the value; the caller adds where it stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from relax_trio.config.spec import FlagSpec


def from_words(spec: FlagSpec, words: Sequence[str]) -> object:
    """The value of `spec` from the words after its flag (none for a switch that is on).

    Raises:
      ValueError: says what is wrong.
    """
    if spec.is_switch:
        return True
    if spec.shape == "pairs":
        return dict(_pair(word) for word in words)
    values = [_from_word(spec, word) for word in words]
    return _checked(spec, values[0] if spec.shape == "one" else tuple(values))


def from_yaml(spec: FlagSpec, value: object) -> object:
    """The value of `spec` from what a YAML file holds under its key.

    Numbers and switches must be YAML numbers and booleans; the one exception is a float written without a dot, such
    as `1e-6`, which YAML 1.1 reads as text.

    Raises:
      ValueError: says what is wrong.
    """
    if value is None:
        if not spec.optional:
            raise ValueError(f"must be {_expected(spec)}, not empty")
        return None
    if spec.shape == "pairs":
        return _pairs_from_yaml(value)
    if spec.shape == "many":
        items = value if isinstance(value, list) else [value]
        return _checked(spec, tuple(_from_yaml_scalar(spec, item) for item in items))
    return _checked(spec, _from_yaml_scalar(spec, value))


def _checked(spec: FlagSpec, value: object) -> object:
    for item in value if isinstance(value, tuple) else (value,):
        if spec.choices and item not in spec.choices:
            raise ValueError(f"must be one of {', '.join(spec.choices)}, not {item!r}")
        wrong = None if spec.check is None else spec.check(item)
        if wrong:
            raise ValueError(f"{wrong}, not {item}")
    return value


def _from_word(spec: FlagSpec, word: str) -> object:
    if "\0" in word:
        raise ValueError("must not hold a NUL character")
    try:
        if spec.kind == "int":
            return int(word)
        if spec.kind == "float":
            return _finite(float(word))
        if spec.kind == "path":
            return _path(word)
    except ValueError:
        raise ValueError(f"must be {_item(spec)}, not {word!r}") from None
    return word


def _from_yaml_scalar(spec: FlagSpec, value: object) -> object:
    if spec.kind == "float" and isinstance(value, str):
        return _from_word(spec, value)
    if spec.kind == "bool" and isinstance(value, bool):
        return value
    if spec.kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if spec.kind == "float" and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if spec.kind in ("str", "path") and isinstance(value, str):
        return _from_word(spec, value)
    quote = "; quote it" if spec.kind == "str" and not isinstance(value, list | dict) else ""
    raise ValueError(f"must be {_item(spec)}, not {_shown(value)}{quote}")


def _pairs_from_yaml(value: object) -> dict[str, str]:
    if isinstance(value, list):
        for item in value:
            if not isinstance(item, str):
                raise ValueError(f"must hold KEY=VALUE texts, not {_shown(item)}")
        return dict(_pair(item) for item in value)
    if not isinstance(value, dict):
        raise ValueError(f"must be a mapping of names to texts, not {_shown(value)}")
    for key, item in value.items():
        # A whole number has one spelling; a float or a boolean has several, and the agent would see one of them.
        if not isinstance(key, str) or not isinstance(item, str | int) or isinstance(item, bool):
            raise ValueError(f"{key} must be a text, not {_shown(item)}; quote it")
    return dict(_pair(f"{key}={item}") for key, item in value.items())


def _pair(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise ValueError(f"must be KEY=VALUE, not {word!r}")
    if "\0" in word:
        raise ValueError(f"{key!r} must not hold a NUL character")
    return key, value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("not finite")
    return value


def _path(word: str) -> Path:
    if not word:
        raise ValueError("empty")
    try:
        return Path(word).expanduser()
    except RuntimeError:  # the home of an unknown user
        return Path(word)


def _item(spec: FlagSpec) -> str:
    return {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text", "path": "a path"}[
        spec.kind
    ]


def _expected(spec: FlagSpec) -> str:
    if spec.shape == "pairs":
        return "a mapping of names to texts"
    return f"a list, each {_item(spec)}" if spec.shape == "many" else _item(spec)


def _shown(value: object) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", dict: "a mapping"}
    name = names.get(type(value), f"a {type(value).__name__}")
    text = str(value)
    return f"{name} ({text if len(text) <= 40 else text[:40] + '…'})"
