"""Whether the files and directories that the configuration names are there, and those it writes can be made."""

from __future__ import annotations

import json
import os
from pathlib import Path

from relax_trio.config.dataset_spec import parse_dataset_spec
from relax_trio.config.tree import Config
from relax_trio.errors import ConfigError

DEMO_CHECKPOINT = "demo"
"""The name under which the built-in model is a checkpoint everywhere."""

_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")


def checkpoint_problems(checkpoint: str | None, *, weights: bool) -> list[str]:
    """What is wrong with `--hf-checkpoint`.

    Args:
      weights: the model itself is needed; else only its tokenizer.
    """
    if checkpoint is None:
        return ["--hf-checkpoint is missing: give a Hugging Face checkpoint directory, or demo for the built-in model"]
    if checkpoint == DEMO_CHECKPOINT:
        return []
    path, told = Path(checkpoint), f"--hf-checkpoint {checkpoint}"
    if not path.exists():
        return [f"{told}: does not exist; nothing is downloaded, so give a local directory"]
    if not path.is_dir():
        return [f"{told}: is not a directory"]
    if not weights:
        found = any((path / name).is_file() for name in _TOKENIZERS)
        return [] if found else [f"{told}: holds no tokenizer ({' or '.join(_TOKENIZERS)})"]
    return _model_problems(path, told)


def reference_problems(path: Path) -> list[str]:
    """What is wrong with `--ref-load`."""
    told = f"--ref-load {path}"
    if str(path) == DEMO_CHECKPOINT:
        return []
    return _model_problems(path, told) if path.is_dir() else [f"{told}: is not a directory"]


def _model_problems(path: Path, told: str) -> list[str]:
    config = path / "config.json"
    if not config.is_file():
        return [f"{told}: holds no config.json, so it is no Hugging Face checkpoint"]
    try:
        content = json.loads(config.read_bytes())
    except (OSError, ValueError) as exc:
        return [f"{told}: config.json cannot be read: {exc}"]
    if not isinstance(content, dict):
        return [f"{told}: config.json must hold an object"]
    if not any(next(path.glob(pattern), None) for pattern in _WEIGHTS):
        return [f"{told}: holds no weights ({' or '.join(_WEIGHTS)})"]
    return []


def dataset_problems(flag: str, spec: str | None) -> list[str]:
    """What is wrong with the dataset that `flag` names; its rows are looked at when it is loaded."""
    if spec is None:
        return [f"{flag} is missing: give a JSON Lines or Parquet file, PATH or PATH@[a:b]"]
    try:
        path = parse_dataset_spec(spec).path
    except ConfigError as exc:
        return [f"{flag}: {exc}"]
    if not path.exists():
        return [f"{flag} {path}: does not exist"]
    if not path.is_file():
        return [f"{flag} {path}: is not a file"]
    return [] if os.access(path, os.R_OK) else [f"{flag} {path}: may not be read"]


def cwd_problems(cwd: Path) -> list[str]:
    """What is wrong with `--agent-cwd`."""
    if not cwd.exists():
        return [f"--agent-cwd {cwd}: does not exist"]
    if not cwd.is_dir():
        return [f"--agent-cwd {cwd}: is not a directory"]
    return [] if os.access(cwd, os.X_OK) else [f"--agent-cwd {cwd}: may not be entered"]


def output_problems(config: Config, *, trains: bool) -> list[str]:
    """What is wrong with the places that the run reads its resume state from and writes to."""
    problems = []
    load, save = config.train.load, config.train.save
    if not trains and load is not None:
        problems.append(f"--load {load}: only training goes on from a checkpoint; name its weights by --hf-checkpoint")
    elif load is not None and not load.is_dir():
        problems.append(f"--load {load}: is not a directory of checkpoints; leave --load out to start anew")
    if trains and save is not None:
        problems += _writable_problems("--save", save)
    if config.output.output_dir is not None:
        problems += _writable_problems("--output-dir", config.output.output_dir)
    dump = config.output.save_debug_rollout_data
    if dump is not None:
        problems += _dump_problems(dump)
    return problems


def _dump_problems(pattern: str) -> list[str]:
    flag = f"--save-debug-rollout-data {pattern}"
    try:
        first, second = pattern.format(rollout_id=0), pattern.format(rollout_id=1)
    except (LookupError, ValueError, TypeError, AttributeError):
        return [f"{flag}: only {{rollout_id}} may stand in braces"]
    if first == second:
        return [f"{flag}: must hold {{rollout_id}}, else each step overwrites the last"]
    return _writable_problems("--save-debug-rollout-data", Path(first).parent)


def _writable_problems(flag: str, path: Path) -> list[str]:
    """What keeps `path` from being made, or written to, as a directory."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return [f"{flag} {path}: {existing} is not a directory"]
    return [] if os.access(existing, os.W_OK | os.X_OK) else [f"{flag} {path}: {existing} may not be written to"]
