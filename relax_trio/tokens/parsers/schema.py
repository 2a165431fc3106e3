"""Types of arguments that a model wrote as plain text, found in the tool's JSON schema.

The rules are those of SGLang's class for Qwen3-Coder, odd corners included: a model that is trained here gets the
same arguments as one that is served there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from relax_trio.data.json import JsonObject, JsonValue, parse_json
from relax_trio.tokens.parsers.python_literal import literal

_TEXT: Final = frozenset({"string", "str", "text", "varchar", "char", "enum"})
_INTEGER: Final = ("int", "uint", "long", "short", "unsigned")
_NUMBER: Final = ("num", "float")
_BOOLEAN: Final = frozenset({"boolean", "bool", "binary"})
_STRUCTURES: Final = frozenset({"object", "array", "arr"})
_STRUCTURE_PREFIXES: Final = ("dict", "list")
_COMBINED: Final = ("anyOf", "oneOf", "allOf")


def parameter_schemas(tools: Sequence[JsonObject], name: str) -> Mapping[str, JsonValue]:
    """Schemas of the parameters of the tool `name`, by parameter; empty for an unknown tool."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            if not isinstance(parameters, dict):
                return {}
            found = _properties(parameters)
            return found if found or "properties" in parameters else parameters
    return {}


def _properties(schema: JsonValue) -> Mapping[str, JsonValue]:
    if not isinstance(schema, dict):
        return {}
    properties = schema.get("properties")
    if isinstance(properties, dict):
        return properties
    merged: dict[str, JsonValue] = {}
    for word in _COMBINED:
        branches = schema.get(word)
        for branch in branches if isinstance(branches, list) else []:
            merged = {**_properties(branch), **merged}
    return merged


def typed_value(text: str, schemas: Mapping[str, JsonValue], parameter: str) -> JsonValue:
    """The value of an argument that is written as `text`.

    `null` is null for every type. What does not fit its type stays text, except that every boolean but `true` is false.
    """
    if text.lower() == "null":
        return None
    if parameter not in schemas:
        return text
    kind = (_kind(schemas[parameter]) or "string").strip().lower()
    if kind in _TEXT:
        return text
    if kind in _BOOLEAN:
        return text.lower() == "true"
    try:
        if kind.startswith(_INTEGER):
            return int(text)
        if kind.startswith(_NUMBER):
            return _number(text)
        return _structure(text, json_first=kind in _STRUCTURES or kind.startswith(_STRUCTURE_PREFIXES))
    except (ValueError, RecursionError):
        return text


def _number(text: str) -> JsonValue:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a JSON number")
    return value


def _structure(text: str, *, json_first: bool) -> JsonValue:
    if json_first:
        try:
            return parse_json(text)
        except ValueError:
            pass  # models write Python's notation too
    return literal(text)


def _kind(schema: JsonValue) -> str | None:
    """The one type that stands for a schema, or None where it names none."""
    if not isinstance(schema, dict):
        return None
    named = schema.get("type")
    if isinstance(named, str):
        return named
    if isinstance(named, list) and named:
        return next((str(kind) for kind in named if kind != "null"), "string")
    if "anyOf" in schema or "oneOf" in schema:
        branches = schema.get("anyOf") or schema.get("oneOf")
        kinds = [kind for branch in (branches if isinstance(branches, list) else []) if (kind := _kind(branch))]
        if kinds:
            return _one_of(kinds)
    values = schema.get("enum")
    if isinstance(values, list):
        kinds = list(dict.fromkeys(_kind_of(value) for value in values))
        return kinds[0] if len(kinds) == 1 else "string"
    branches = schema.get("allOf")
    if isinstance(branches, list):
        kinds = [kind for branch in branches if (kind := _kind(branch))]
        return next((kind for kind in kinds if kind != "string"), "string")
    if "properties" in schema:
        return "object"
    return "array" if "items" in schema else None


def _one_of(kinds: Sequence[str]) -> str:
    different = list(dict.fromkeys(kinds))
    if len(different) == 2 and "null" in different:
        different.remove("null")
    return different[0] if len(different) == 1 or "string" not in different else "string"


def _kind_of(value: JsonValue) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]
