"""The flags that a config class declares: name, kind of value, default, words for help and docs.

Owns the way from an attrs field to a flag. Not covered: the values users write (values.py) and where they write them
(parse.py, yaml_file.py).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import attrs
from attrs import frozen

from relax_trio.config.tree import Config

Kind: TypeAlias = Literal["bool", "int", "float", "str", "path"]

_KINDS: dict[object, Kind] = {bool: "bool", int: "int", float: "float", str: "str", Path: "path"}
_FACTORY: Any = type(attrs.Factory(list))
_METAVARS: dict[Kind, str] = {"bool": "", "int": "N", "float": "X", "str": "TEXT", "path": "PATH"}


@frozen(kw_only=True)
class FlagSpec:
    """One option of the configuration.

    Attributes:
      section: name of the section that holds it; "" for a command's own flags.
      name: field name, snake_case: the YAML key and the hooks' name.
      flag: the flag without dashes, kebab-case.
      kind: kind of the value, or of each value where there are many.
      shape: one value, several values, or KEY=VALUE pairs.
      optional: None is a value.
      default: value when nobody says anything; `attrs.NOTHING` where it must be given.
      help, unit, why, metavar, choices, check, passes: as declared by `option()`.
    """

    section: str
    name: str
    flag: str
    kind: Kind
    shape: Literal["one", "many", "pairs"]
    optional: bool
    default: object
    help: str
    unit: str
    why: str
    metavar: str
    choices: tuple[str, ...]
    check: Callable[[Any], str | None] | None
    passes: str

    @property
    def is_switch(self) -> bool:
        """True for `--x` / `--no-x`, which take no value."""
        return self.kind == "bool" and self.shape == "one"


def section_specs(cls: type, section: str) -> tuple[FlagSpec, ...]:
    """The flags of one attrs class, in the order of its fields; their section is named `section`."""
    hints = get_type_hints(cls)
    return tuple(_spec(field, hints[field.name], section) for field in attrs.fields(cls))


@cache
def config_specs() -> tuple[FlagSpec, ...]:
    """Every flag of the configuration tree, section by section."""
    hints = get_type_hints(Config)
    return tuple(spec for section in attrs.fields(Config) for spec in section_specs(hints[section.name], section.name))


@cache
def section_classes() -> dict[str, type]:
    """The class of each section of the tree, by the section's name."""
    hints = get_type_hints(Config)
    return {section.name: hints[section.name] for section in attrs.fields(Config)}


def section_title(section: str) -> str:
    """The first line of the section's docstring, without its full stop."""
    text = section_classes()[section].__doc__ or section
    return text.strip().splitlines()[0].rstrip(".")


def _spec(field: attrs.Attribute[Any], hint: object, section: str) -> FlagSpec:
    option = field.metadata["option"]
    kind, shape, optional = _classify(hint)
    default = field.default
    if isinstance(default, _FACTORY):
        default = default.factory()
    return FlagSpec(
        section=section,
        name=field.name,
        flag=option["flag"] or field.name.replace("_", "-"),
        kind=kind,
        shape=shape,
        optional=optional,
        default=default,
        help=option["help"],
        unit=option["unit"],
        why=option["why"],
        metavar="" if kind == "bool" else option["metavar"] or _METAVARS[kind],
        choices=option["choices"],
        check=option["check"],
        passes=option["passes"],
    )


def _classify(hint: object) -> tuple[Kind, Literal["one", "many", "pairs"], bool]:
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        inner = [part for part in get_args(hint) if part is not type(None)]
        assert len(inner) == 1, f"an option holds one type or None, not {hint}"
        optional, hint = True, inner[0]
    if get_origin(hint) is tuple:
        return _KINDS[get_args(hint)[0]], "many", optional
    if get_origin(hint) is dict:
        assert get_args(hint) == (str, str), f"an option of pairs maps text to text, not {hint}"
        return "str", "pairs", optional
    return _KINDS[hint], "one", optional
