"""From a command line to the configuration tree, with the origin of every value.

Command line wins over `--config` files (a later file over an earlier one), files win over the command's own defaults,
those over the tree's. A flag given again replaces what it said before; KEY=VALUE pairs add up over all places.
Not covered: whether the result can be run (check.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import attrs
from attrs import define, field, frozen

from relax_trio.config.nearest import did_you_mean
from relax_trio.config.problems import raise_problems
from relax_trio.config.spec import FlagSpec, config_specs, section_classes, section_specs
from relax_trio.config.tree import Config
from relax_trio.config.values import from_words
from relax_trio.config.yaml_file import read_yaml
from relax_trio.errors import EngineFault

COMMAND_LINE = "command line"
DEFAULT = "default"

T = TypeVar("T")


@frozen(kw_only=True)
class Resolved:
    """The configuration and where each value came from.

    Attributes:
      config: the tree.
      origins: by field name: "default", the name of the command's defaults, the path of a file or "command line"; for
        pairs that came from several places their names joined by " + ".
    """

    config: Config
    origins: Mapping[str, str]


@frozen
class _NoFlags:
    """A command without flags of its own."""


def parse_config(
    argv: Sequence[str], *, defaults: Mapping[str, object] | None = None, defaults_origin: str = "command default"
) -> Resolved:
    """Resolve the configuration from a command line.

    Args:
      argv: the words after the command's name.
      defaults: the command's own defaults by field name, typed as the fields are.
      defaults_origin: how the origins name `defaults`, e.g. "demo default".

    Raises:
      ConfigError: lists every unknown flag, stray word and wrong value, each with its place.
    """
    return parse_command(argv, _NoFlags, defaults=defaults, defaults_origin=defaults_origin)[0]


def parse_command(
    argv: Sequence[str],
    own: type[T],
    *,
    defaults: Mapping[str, object] | None = None,
    defaults_origin: str = "command default",
) -> tuple[Resolved, T]:
    """`parse_config` for a command that has flags of its own besides the configuration's.

    Args:
      own: frozen attrs class whose fields are `option()`s; its flags are taken from the command line only, not from
        files. Fields without a default must be given.

    Returns:
      The configuration, and an instance of `own`.
    """
    own_specs = section_specs(own, "")
    line = _CommandLine((*config_specs(), *own_specs))
    line.read(argv)
    missing = [spec for spec in own_specs if spec.default is attrs.NOTHING and spec.name not in line.values]
    line.problems += [f"--{spec.flag} must be given: {spec.help}" for spec in missing]
    raise_problems(line.problems)
    own_values = {spec.name: line.values.pop(spec.name) for spec in own_specs if spec.name in line.values}
    layers = [(defaults_origin, dict(defaults or {}))]
    layers += [(str(path), dict(read_yaml(path))) for path in line.files]
    layers.append((COMMAND_LINE, line.values))
    return _merge(layers), own(**own_values)


def _merge(layers: Sequence[tuple[str, Mapping[str, object]]]) -> Resolved:
    specs = {spec.name: spec for spec in config_specs()}
    values: dict[str, object] = {}
    origins = dict.fromkeys(specs, DEFAULT)
    for origin, layer in layers:
        for name, value in layer.items():
            if name not in specs:
                raise EngineFault(f"the {origin} names {name}, which is no option")
            earlier = values.get(name)
            if specs[name].shape == "pairs" and isinstance(earlier, dict) and earlier and isinstance(value, dict):
                values[name] = {**earlier, **value}
                origins[name] = f"{origins[name]} + {origin}"
            else:
                values[name] = value
                origins[name] = origin
    sections = {
        section: cls(**{name: value for name, value in values.items() if specs[name].section == section})
        for section, cls in section_classes().items()
    }
    return Resolved(config=Config(**sections), origins=origins)


@define(eq=False)
class _CommandLine:
    """The words of a command line, sorted into values, files and problems."""

    specs: Sequence[FlagSpec]
    values: dict[str, object] = field(factory=dict)
    files: list[Path] = field(factory=list)
    problems: list[str] = field(factory=list)

    def read(self, argv: Sequence[str]) -> None:
        by_flag = {spec.flag: spec for spec in self.specs}
        rest = list(argv)
        while rest:
            word = rest.pop(0)
            if not word.startswith("-") or word == "-":
                self.problems.append(f"{word!r} belongs to no flag; quote a value that holds blanks")
                continue
            name, equals, value = word.removeprefix("--").partition("=")
            inline = [value] if equals else None
            if name == "config" and word.startswith("--"):
                words = inline or self._values_of(rest, limit=1)
                self._add_file(words)
            elif word.startswith("--") and name in by_flag:
                self._add(by_flag[name], inline, rest)
            elif word.startswith("--no-") and (spec := by_flag.get(name.removeprefix("no-"))) and spec.is_switch:
                self._turn_off(spec, inline)
            elif word.startswith("--") and (spec := self._passing(name)):
                self._pass_on(spec, name, inline if inline is not None else self._values_of(rest, limit=None))
            else:
                self._unknown(word, name, by_flag)
                self._values_of(rest, limit=None)

    def _passing(self, name: str) -> FlagSpec | None:
        """The option that takes another program's flags, if `name` is one of those."""
        return next((spec for spec in self.specs if spec.passes and name.startswith(spec.passes)), None)

    def _pass_on(self, spec: FlagSpec, name: str, words: list[str]) -> None:
        """Add a flag of another program, with its values, as it was written."""
        earlier = self.values.get(spec.name, ())
        assert isinstance(earlier, tuple), "an option that passes flags on has many words"
        self.values[spec.name] = (*earlier, f"--{name.removeprefix(spec.passes)}", *words)

    def _add(self, spec: FlagSpec, inline: list[str] | None, rest: list[str]) -> None:
        if spec.is_switch:
            if inline is not None:
                self.problems.append(f"--{spec.flag} takes no value; turn it off with --no-{spec.flag}")
            self.values[spec.name] = True
            return
        words = inline
        if words is None:
            words = self._values_of(rest, limit=1 if spec.shape == "one" else None)
        if not words:
            hint = f"; write --{spec.flag}=VALUE for one that begins with --" if rest else ""
            self.problems.append(f"--{spec.flag} needs a value ({spec.metavar}){hint}")
            return
        try:
            value = from_words(spec, words)
        except ValueError as exc:
            self.problems.append(f"--{spec.flag}: {exc}")
            return
        earlier = self.values.get(spec.name)
        if spec.shape == "pairs" and isinstance(earlier, dict) and isinstance(value, dict):
            value = {**earlier, **value}
        self.values[spec.name] = value

    def _add_file(self, words: list[str]) -> None:
        if words and words[0]:
            self.files.append(Path(words[0]).expanduser())
        else:
            self.problems.append("--config needs a value (FILE)")

    def _turn_off(self, spec: FlagSpec, inline: list[str] | None) -> None:
        if inline is not None:
            self.problems.append(f"--no-{spec.flag} takes no value")
        self.values[spec.name] = False

    def _unknown(self, word: str, name: str, by_flag: Mapping[str, FlagSpec]) -> None:
        base = name.removeprefix("no-")
        if word.startswith("--no-") and base in by_flag:
            self.problems.append(f"--no-{base}: only a switch can be turned off; --{base} takes a value")
            return
        known = [*by_flag, "config"]
        switches = [f"no-{flag}" for flag, spec in by_flag.items() if spec.is_switch]
        hint = did_you_mean(name.lstrip("-").replace("_", "-"), [*known, *switches], prefix="--")
        self.problems.append(f"unknown flag {word.partition('=')[0]}{hint}")

    @staticmethod
    def _values_of(rest: list[str], *, limit: int | None) -> list[str]:
        """Take the values that stand next in `rest`: up to `limit` words, none that begins with --."""
        taken: list[str] = []
        while rest and not rest[0].startswith("--") and (limit is None or len(taken) < limit):
            taken.append(rest.pop(0))
        return taken
