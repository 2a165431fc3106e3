"""Reading single fields of a request body. Null means absent; what is there must have the right type.

Only fields that mean something here are read; anything else in a body is ignored, whatever its type.
"""

from __future__ import annotations

from collections.abc import Container

from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.normalize import clean_text
from relax_trio.errors import InvalidRequest, UnsupportedFeature

THINKING_VARIABLE = "enable_thinking"
"""What chat templates call the switch of reasoning."""

SEED_LIMIT = 2**63
"""Seeds are signed 64-bit numbers on the wire and in the engines."""


def body_object(body: JsonValue) -> JsonObject:
    """The body as an object.

    Raises:
      InvalidRequest: it is something else.
    """
    if not isinstance(body, dict):
        raise InvalidRequest(f"the request body must be a JSON object, not {kind_of(body)}")
    return body


def optional_bool(body: JsonObject, name: str) -> bool:
    """`body[name]`, False where absent."""
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, not {kind_of(value)}", param=name)
    return value


def optional_text(body: JsonObject, name: str) -> str | None:
    """`body[name]`, None where absent."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, not {kind_of(value)}", param=name)
    return clean_text(value)


def optional_int(body: JsonObject, name: str, *, low: int, high: int = SEED_LIMIT - 1) -> int | None:
    """`body[name]` within [low, high], None where absent. 64.0 is 64: some clients know only one kind of number."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be an integer, not {kind_of(value)}", param=name)
    if not low <= value <= high:
        bound = f"at least {low}" if value < low else f"at most {high}"
        raise InvalidRequest(f"{name} must be {bound}", param=name)
    return value


def stop_strings(body: JsonObject, name: str) -> tuple[str, ...]:
    """`body[name]` as stop strings: one string, a list of them, or none."""
    value = body.get(name)
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list):
        raise InvalidRequest(f"{name} must be a string or a list of strings, not {kind_of(value)}", param=name)
    stops = []
    for index, item in enumerate(listed):
        path = name if item is value else f"{name}[{index}]"
        if not isinstance(item, str):
            raise InvalidRequest(f"{path} must be a string, not {kind_of(item)}", param=path)
        if not item:
            raise InvalidRequest(f"{path} must not be empty: an empty text would stop every turn at once", param=path)
        stops.append(clean_text(item))
    return tuple(stops)


def refuse_many_choices(body: JsonObject) -> None:
    """Refuse `n` greater than 1.

    Raises:
      UnsupportedFeature: more than one choice is asked for.
      InvalidRequest: `n` is no positive integer.
    """
    n_choices = optional_int(body, "n", low=1)
    if n_choices is not None and n_choices > 1:
        raise UnsupportedFeature(
            f"n is {n_choices}, but one request gives one choice; send the request {n_choices} times instead "
            "(each samples afresh)",
            param="n",
        )


def effort_wish(raw: JsonValue, path: str) -> bool | None:
    """Whether a reasoning effort asks for reasoning (True) or for none (False); None where there is no effort.

    Raises:
      InvalidRequest: it is no string.
    """
    if raw is None:
        return None
    if not isinstance(raw, str):
        raise InvalidRequest(f"{path} must be a string, not {kind_of(raw)}", param=path)
    return raw not in ("none", "minimal")


def thinking_kwargs(wish: bool | None, template_variables: Container[str]) -> JsonObject:
    """The template arguments that `wish` means; none where there is no wish, or the template has no such switch."""
    if wish is None or THINKING_VARIABLE not in template_variables:
        return {}
    return {THINKING_VARIABLE: wish}


def kind_of(value: JsonValue) -> str:
    """How JSON calls the type of `value`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    return {str: "a string", list: "a list", dict: "an object"}[type(value)]
