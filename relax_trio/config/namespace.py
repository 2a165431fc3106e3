"""The flat view of the configuration that user hooks get as `args`."""

from __future__ import annotations

from types import SimpleNamespace

from relax_trio.config.spec import config_specs
from relax_trio.config.tree import Config


def hook_args(config: Config) -> SimpleNamespace:
    """Every option under its field name, typed as in the tree; made anew for each caller, so hooks may write on it."""
    values = {spec.name: getattr(getattr(config, spec.section), spec.name) for spec in config_specs()}
    copies = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
    return SimpleNamespace(**copies)
