"""The configuration as people read it: the resolved tree, as flags and as a file, `--help`, the reference page."""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

import attrs

from relax_trio.config.parse import DEFAULT, Resolved
from relax_trio.config.spec import FlagSpec, config_specs, section_title

WIDTH = 100

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_MASK = "***"

_CONFIG_HELP = "YAML file with the same names as the flags; may be given again, the later file wins."


def render_tree(resolved: Resolved) -> str:
    """The tree as flags, section by section, each with its unit and `(origin)`; secrets of `--agent-env` are masked.

    A value that is not set stands as `(not set)`; what that means is in `--help`.
    """
    blocks = []
    for section, specs in _sections(config_specs()):
        values = getattr(resolved.config, section)
        rows = [(_setting(spec, getattr(values, spec.name)), f"({resolved.origins[spec.name]})") for spec in specs]
        width = max(len(setting) for setting, _ in rows if len(setting) <= WIDTH // 2)
        lines = [f"  {setting:<{width}}  {origin}" for setting, origin in rows]
        blocks.append("\n".join([section, *lines]))
    return "\n\n".join(blocks) + "\n"


def render_yaml(resolved: Resolved) -> str:
    """The tree as a file for `--config` that gives the same values, with the origin above what is no default.

    Variables of `--agent-env` whose names tell of a secret are left out and named in a comment.
    """
    blocks = []
    for section, specs in _sections(config_specs()):
        values = getattr(resolved.config, section)
        entries = [_yaml_entry(spec, getattr(values, spec.name), resolved.origins[spec.name]) for spec in specs]
        blocks.append(f"{section}:\n" + textwrap.indent("".join(entries), "  "))
    return "\n".join(blocks)


def render_help(usage: str, summary: str, own: Iterable[FlagSpec] = ()) -> str:
    """`--help` of a command: what it does, its own flags, then every flag of the configuration by section.

    Args:
      usage: the command line without flags, e.g. "relax-trio train".
      summary: one sentence on what the command does.
      own: the command's own flags.
    """
    own_block = "".join(_help_entry(spec) for spec in own)
    blocks = [
        f"usage: {usage} [--config FILE] [--flag VALUE …]\n\n{summary}\n",
        "This command\n" + own_block if own_block else "",
        "Files\n" + _entry("--config FILE", _CONFIG_HELP),
        *(
            f"{section_title(section)}\n" + "".join(_help_entry(spec) for spec in specs)
            for section, specs in _sections(config_specs())
        ),
    ]
    return "\n".join(block for block in blocks if block)


def render_reference() -> str:
    """The reference page of all flags as Markdown, one table per section."""
    parts = [
        "# Flags\n\n"
        "Every flag is also a YAML key for `--config FILE`: the name without the leading dashes, with `-` or `_`, at\n"
        "the top of the file or under the section it stands in here. The command line wins over files, a later file\n"
        "over an earlier one, files over defaults. A flag given again replaces what it said before; `KEY=VALUE` pairs\n"
        "add up, the last duplicate wins. A switch `--x` is turned off by `--no-x`. A value that begins with `--` is\n"
        "written `--flag=VALUE`.\n\n"
        "This page is the output of `relax-trio config --reference`.\n"
    ]
    for section, specs in _sections(config_specs()):
        rows = "".join(_reference_row(spec) for spec in specs)
        head = "| Flag | Default | Unit | Meaning | Why this default |\n| --- | --- | --- | --- | --- |\n"
        parts.append(f"## {section}\n\n{section_title(section)}.\n\n{head}{rows}")
    return "\n".join(parts)


def _sections(specs: Iterable[FlagSpec]) -> Iterable[tuple[str, list[FlagSpec]]]:
    return ((section, list(group)) for section, group in groupby(specs, key=lambda spec: spec.section))


def _setting(spec: FlagSpec, value: object) -> str:
    if isinstance(value, bool):
        return f"--{spec.flag}" if value else f"--no-{spec.flag}"
    text = _text(spec, value)
    if not text:
        return f"--{spec.flag} (not set)"
    return f"--{spec.flag} {text}" + (f" {spec.unit}" if spec.unit else "")


def _text(spec: FlagSpec, value: object) -> str:
    """The value as it would be written after its flag; "" when there is none."""
    if value is None or value is attrs.NOTHING:
        return ""
    if isinstance(value, Mapping):
        return " ".join(shlex.quote(f"{key}={_MASK if _SECRET.search(key) else item}") for key, item in value.items())
    if isinstance(value, tuple):
        return " ".join(shlex.quote(str(item)) for item in value)
    if isinstance(value, str | Path):
        return shlex.quote(str(value))
    return str(value).removesuffix(".0")


def _yaml_entry(spec: FlagSpec, value: object, origin: str) -> str:
    comments = [] if origin == DEFAULT else [origin]
    if isinstance(value, Mapping):
        comments += [f"{key} is not written down" for key in value if _SECRET.search(key)]
        value = {key: item for key, item in value.items() if not _SECRET.search(key)}
    above = "".join(f"# {' '.join(comment.split())}\n" for comment in comments)
    return f"{above}{spec.name}: {_yaml_value(value)}\n"


def _yaml_value(value: object) -> str:
    """One line of YAML. Texts are quoted, so that none is read as something else."""
    import yaml  # here, because most commands never write a file

    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_yaml_value(key)}: {_yaml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_yaml_value(item) for item in value) + "]"
    if isinstance(value, str | Path):
        dumped = yaml.safe_dump(str(value), allow_unicode=True, default_style='"', width=math.inf)
    else:
        dumped = yaml.safe_dump(value)
    return dumped.partition("\n")[0]


def _placeholder(spec: FlagSpec) -> str:
    if spec.is_switch:
        return ""
    choices = "{" + ",".join(spec.choices) + "}"
    name = choices if spec.choices and len(choices) < WIDTH // 2 else spec.metavar
    return f" {name}" + ("" if spec.shape == "one" or "…" in name else " …")


def _help_entry(spec: FlagSpec) -> str:
    notes = [note for note in (spec.unit and f"unit: {spec.unit}", _default_note(spec)) if note]
    name = _placeholder(spec)
    told = spec.help if not spec.choices or "{" in name else f"{spec.help} One of {', '.join(spec.choices)}."
    text = f"{told} ({'; '.join(notes)})" if notes else told
    return _entry(f"--{'[no-]' if spec.is_switch else ''}{spec.flag}{name}", text)


def _default_note(spec: FlagSpec) -> str:
    if spec.default is attrs.NOTHING:
        return "must be given"
    if spec.is_switch and spec.default is not None:
        return "default: on" if spec.default else "default: off"
    text = _text(spec, spec.default)
    return f"default: {text}" if text else ""


def _entry(head: str, text: str) -> str:
    body = textwrap.wrap(text, WIDTH - 8, break_long_words=False, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in [f"  {head}", *(f"        {line}" for line in body)])


def _reference_row(spec: FlagSpec) -> str:
    meaning = spec.help
    if spec.choices:
        meaning += f" One of {', '.join(f'`{choice}`' for choice in spec.choices)}."
    if spec.is_switch:
        flag, default = f"`--{spec.flag}`", "not set" if spec.default is None else "on" if spec.default else "off"
    else:
        flag = f"`--{spec.flag} {spec.metavar}{'' if spec.shape == 'one' else ' …'}`"
        text = _text(spec, spec.default)
        default = f"`{text}`" if text else "not set"
    cells = [flag, default, spec.unit or "–", meaning, spec.why or "–"]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |\n"
