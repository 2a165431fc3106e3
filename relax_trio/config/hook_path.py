"""Hooks by their name: `package.module.function`. Not covered: calling them (reward/)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from relax_trio.config.nearest import did_you_mean
from relax_trio.errors import ConfigError, boundary


def import_hook(flag: str, path: str) -> Callable[..., Any]:
    """Import the function that `path` names. Runs the module's own code the first time.

    Args:
      flag: the flag that gave it, with its dashes, for errors.
      path: `package.module.function`.

    Raises:
      ConfigError: no such name, a module that can't be imported, no such function in it, or no function.
    """
    module_name, dot, name = path.rpartition(".")
    if not dot or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(f"{flag} {path}: must be package.module.function")
    with boundary(ConfigError, f"{flag} {path}: {module_name} cannot be imported", Exception):
        module = importlib.import_module(module_name)
    function = getattr(module, name, None)
    if function is None:
        hint = did_you_mean(name, (known for known in vars(module) if not known.startswith("_")))
        raise ConfigError(f"{flag} {path}: {module_name} has no {name}{hint}")
    if not callable(function):
        raise ConfigError(f"{flag} {path}: is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]  # callable() was asked above
