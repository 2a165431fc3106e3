"""JSON as this project means it: finite numbers, string keys, one canonical text for each value."""

from __future__ import annotations

import json
import math
from typing import Final, TypeAlias

JsonScalar: TypeAlias = str | int | float | bool | None
JsonValue: TypeAlias = "JsonScalar | list[JsonValue] | dict[str, JsonValue]"
JsonObject: TypeAlias = "dict[str, JsonValue]"


def _refuse_constant(text: str) -> JsonValue:
    raise ValueError(f"{text} is not a JSON number")


def parse_json(text: str | bytes) -> JsonValue:
    """Parse JSON and refuse what JSON does not have.

    Raises:
      ValueError: malformed, not UTF-8, NaN or infinity, or nested too deeply.
    """
    try:
        value: JsonValue = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def canonical_json(value: JsonValue) -> str:
    """Write `value` compactly with sorted keys; integral floats as ints (JavaScript writes 3.0 as 3).

    Two values that mean the same have the same text.

    Raises:
      ValueError: NaN or infinity inside.
      TypeError: something that is no JSON value inside.
    """
    return json.dumps(_canonical(value), ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _canonical(value: JsonValue) -> JsonValue:
    if isinstance(value, float) and not isinstance(value, bool):
        if math.isfinite(value) and value.is_integer():
            return int(value)
        return value
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    return value


JSON_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)
"""Reads the JSON value at a place in a text, and refuses what JSON does not have."""
