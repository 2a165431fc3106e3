"""How one option of the configuration is declared: default, help, unit and reason beside the field it fills."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs


def option(
    default: Any = attrs.NOTHING,
    help: str = "",  # noqa: A002 - the word every command-line reader knows
    *,
    unit: str = "",
    why: str = "",
    flag: str | None = None,
    factory: Callable[[], Any] | None = None,
    metavar: str = "",
    choices: tuple[str, ...] = (),
    check: Callable[[Any], str | None] | None = None,
    passes: str = "",
) -> Any:
    """Declare an option as an attrs field.

    Args:
      default: value when the user says nothing; leave out for a field that must be given.
      help: one sentence for `--help` and the docs.
      unit: unit of the value ("s", "tokens", "Groups", …), shown in help and docs.
      why: the reason for the default.
      flag: flag name without dashes; default: the field's name with `-` for `_`.
      factory: makes the default instead of `default`.
      metavar: placeholder in `--help`.
      choices: the allowed texts, if closed.
      check: given the value, returns what is wrong with it, or None.
      passes: flags that begin so and are no options of ours are another program's: their words, without this prefix,
        are added to this option.

    Returns:
      An `attrs.field` that carries all of it in its metadata under "option".
    """
    metadata = {
        "option": {
            "help": help,
            "unit": unit,
            "why": why,
            "flag": flag,
            "metavar": metavar,
            "choices": choices,
            "check": check,
            "passes": passes,
        }
    }
    if factory is not None:
        return attrs.field(factory=factory, metadata=metadata)
    return attrs.field(default=default, metadata=metadata)


def positive(value: float | None) -> str | None:
    """Check for options that must be greater than zero (None passes)."""
    return None if value is None or value > 0 else "must be greater than 0"


def not_negative(value: float | None) -> str | None:
    """Check for options that must be zero or greater (None passes)."""
    return None if value is None or value >= 0 else "must be 0 or greater"


def above_one(value: float | None) -> str | None:
    """Check for options that must be greater than one (None passes)."""
    return None if value is None or value > 1 else "must be greater than 1"


def grace(value: float) -> str | None:
    """Check for graces inside a clean-up, which is bounded: 0 to 15 seconds."""
    return None if 0 <= value <= 15 else "must be 0 to 15"


def fraction(value: float) -> str | None:
    """Check for options in (0, 1]."""
    return None if 0 < value <= 1 else "must be greater than 0 and at most 1"


def log_room(value: int) -> str | None:
    """Check for the size of a log that is cut: its newest part must hold what an error shows."""
    return None if value >= 65536 else "must be 65536 or greater"


def image_key_json(value: str | None) -> str | None:
    """Check for the row key of images, written as users of the field's trainers write it (None passes)."""
    wrong = """must be a JSON object such as {"image":"images"}: images are the only media that are served"""
    if value is None:
        return None
    try:
        keys = json.loads(value)
    except ValueError:
        return wrong
    is_key = isinstance(keys, dict) and set(keys) == {"image"} and isinstance(keys["image"], str) and keys["image"]
    return None if is_key else wrong


def module_names(value: str) -> str | None:
    """Check for module names between commas."""
    if all(part.isidentifier() for name in value.split(",") for part in name.split(".")):
        return None
    return "must be module names with commas between them"
