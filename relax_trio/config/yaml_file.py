"""Options from a YAML file: the same names as the flags, flat or under their sections.

Not covered: what wins over what (parse.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_trio.config.nearest import did_you_mean
from relax_trio.config.problems import raise_problems
from relax_trio.config.spec import FlagSpec, config_specs, section_classes
from relax_trio.config.values import from_yaml
from relax_trio.errors import ConfigError

if TYPE_CHECKING:
    from yaml.nodes import MappingNode


def read_yaml(path: Path) -> Mapping[str, object]:
    """Read the options of a YAML file.

    Keys are flag names without dashes in front (`rollout-batch-size`) or field names (`rollout_batch_size`), at the top
    or under the name of their section. Paths are taken as on the command line: relative to the working directory.

    Returns:
      Values by field name, typed; only those that the file sets.

    Raises:
      ConfigError: the file can't be read or isn't a mapping; lists every key that is unknown, misplaced, given twice
        or of the wrong type.
    """
    content = _load(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be a mapping of option names to values")
    reader = _Reader(str(path))
    reader.read(content, section=None)
    raise_problems(reader.problems)
    return reader.values


class _Reader:
    """Collects the values and the problems of one file."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._specs = {spec.name: spec for spec in config_specs()}
        self._by_flag = {spec.flag: spec for spec in config_specs()}
        self.values: dict[str, object] = {}
        self.problems: list[str] = []

    def read(self, content: Mapping[object, object], section: str | None) -> None:
        for key, value in content.items():
            where = f"{self._name}: {key if section is None else f'{section}.{key}'}"
            spec = self._find(key)
            if spec is None and section is None and key in section_classes():
                self._read_section(str(key), value)
            elif spec is None and key in section_classes():
                self.problems.append(f"{where}: is a section and belongs at the top, not under {section}")
            elif spec is None:
                known = [*self._specs, *(() if section else section_classes())]
                self.problems.append(f"{where}: unknown key{did_you_mean(str(key).replace('-', '_'), known)}")
            elif section not in (None, spec.section):
                self.problems.append(f"{where}: belongs under {spec.section}, not {section}")
            elif spec.name in self.values:
                self.problems.append(f"{where}: given twice in this file")
            else:
                self._read_value(spec, value, where)

    def _find(self, key: object) -> FlagSpec | None:
        return self._specs.get(str(key)) or self._by_flag.get(str(key))

    def _read_section(self, section: str, value: object) -> None:
        if isinstance(value, dict):
            self.read(value, section)
        elif value is not None:
            self.problems.append(f"{self._name}: {section}: is a section and must be a mapping of option names")

    def _read_value(self, spec: FlagSpec, value: object, where: str) -> None:
        try:
            self.values[spec.name] = from_yaml(spec, value)
        except ValueError as exc:
            self.problems.append(f"{where}: {exc}")


def _load(path: Path) -> object:
    import yaml  # here, because most commands never read a file

    class Loader(yaml.SafeLoader):
        """SafeLoader that refuses a key given twice, which YAML forbids and PyYAML accepts."""

    def construct_mapping(loader: Loader, node: MappingNode) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise ConfigError(f"{path}:{key_node.start_mark.line + 1}: {key_node.value}: given twice in this file")
            if isinstance(key_node.value, str):
                seen.add(key_node.value)
        loader.flatten_mapping(node)
        return loader.construct_mapping(node, deep=True)

    Loader.add_constructor("tag:yaml.org,2002:map", construct_mapping)
    try:
        with path.open("rb") as file:
            return yaml.load(file, Loader=Loader)
    except OSError as exc:
        raise ConfigError(f"--config {path}: cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--config {path}: is no valid YAML: {exc}") from exc
