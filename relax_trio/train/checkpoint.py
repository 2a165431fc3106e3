"""Checkpoint directories that are complete or not there.

    SAVE/step_000012/   payload files, state.json, manifest.json (names and sizes of all the others)
    SAVE/latest         name of the newest one

A checkpoint is written beside its place and renamed into it; `latest` follows. Whatever a killed save leaves has a name
with a leading dot: readers pass over it (one case excepted, see `_place`), the next save clears it away. Owns no
content: what the payload is, is the trainer's business. Imports no torch, so that a preflight may use it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from relax_trio.data.json import JsonObject, JsonValue, parse_json
from relax_trio.errors import ConfigError, TrainError, boundary
from relax_trio.events import emit
from relax_trio.train.disk import Disk

LATEST = "latest"
STATE = "state.json"
MANIFEST = "manifest.json"
FORMAT = 1

_STEP = re.compile(r"step_(\d+)")
_LEFTOVER = re.compile(r"\.(step_\d+)\.(tmp|old)|\.latest\.tmp")


def step_name(step: int) -> str:
    """Directory name of the checkpoint after `step` optimizer phases: "step_000012"."""
    return f"step_{step:06d}"


def write_checkpoint(
    directory: Path, step: int, payload: Callable[[Path], None], state: JsonObject, disk: Disk | None = None
) -> Path:
    """Write `directory/step_NNNNNN` and make it the latest. Blocking; for a worker thread.

    Killed at any point, it leaves `directory` with a complete latest checkpoint: the one from before or the new one.
    An existing checkpoint of the same step is replaced.

    Args:
      directory: home of all checkpoints; made if missing.
      step: its number.
      payload: writes its files into the directory it is given.
      state: becomes state.json.
      disk: file system to use.

    Returns:
      The complete checkpoint.

    Raises:
      TrainError: it could not be written, e.g. the disk is full; what was written of it is removed.
    """
    disk = disk or Disk()
    target = directory / step_name(step)
    part = directory / f".{target.name}.tmp"
    try:
        with boundary(TrainError, f"checkpoint {target} could not be written", OSError, TypeError, ValueError):
            disk.make_dir(directory)
            _clear_leftovers(directory, disk)
            disk.make_dir(part)
            disk.fill(part, payload)
            disk.write_text(part / STATE, json.dumps(state, indent=2, allow_nan=False) + "\n")
            disk.write_text(part / MANIFEST, json.dumps({"format": FORMAT, "files": _sizes(part)}, indent=2) + "\n")
            disk.sync_tree(part)
            _put(part, target, disk)
    except TrainError as exc:
        try:
            disk.remove(part)
        except OSError as left:
            exc.add_note(f"{part} is left behind ({left}); the next save removes it")
        raise
    return target


def prune(directory: Path, keep: int, disk: Disk | None = None) -> None:
    """Remove all checkpoints but the latest and, of the others, the `keep` - 1 of the highest numbers. Blocking.

    Killed at any point, it leaves complete checkpoints, and what the next save clears away.

    Raises:
      TrainError: one could not be removed.
    """
    disk = disk or Disk()
    with boundary(TrainError, f"old checkpoints in {directory} could not be removed", OSError):
        named = (directory / LATEST).read_text(encoding="utf-8").strip()
        names = [path.name for path in directory.iterdir() if _STEP.fullmatch(path.name) and path.name != named]
        names.sort(key=_number, reverse=True)
        for name in names[keep - 1 :]:
            doomed = directory / f".{name}.tmp"
            disk.rename(directory / name, doomed)
            disk.remove(doomed)


def find_latest(directory: Path) -> Path | None:
    """Find the checkpoint to resume from.

    Args:
      directory: home of checkpoints, or one checkpoint.

    Returns:
      The one that `latest` names if it is complete, else the complete one with the highest number (event
      `checkpoint.skipped` tells of each that was passed over); None if there is none at all.

    Raises:
      ConfigError: there are checkpoints, but all are damaged; names the first missing or damaged file.
    """
    if (directory / MANIFEST).exists():
        verify(directory)
        return directory
    problems = []
    for path in _candidates(directory):
        problem = _problem(path)
        if problem is None:
            return path
        problems.append(problem)
        emit("checkpoint.skipped", path=str(path), reason=problem)
    if problems:
        raise ConfigError(f"no complete checkpoint in {directory}: {problems[0]}")
    return None


def load_state(path: Path) -> JsonObject:
    """Read state.json of one checkpoint.

    Raises:
      ConfigError: the checkpoint is incomplete or damaged; names the file.
    """
    verify(path)
    state = _read_object(path / STATE)
    if isinstance(state, str):
        raise ConfigError(f"checkpoint {path}: {state}")
    return state


def verify(path: Path) -> None:
    """Check that every file of the checkpoint `path` is there in its full length.

    Raises:
      ConfigError: naming the first file that isn't.
    """
    problem = _problem(path)
    if problem is not None:
        raise ConfigError(f"checkpoint {path}: {problem}")


def _put(part: Path, target: Path, disk: Disk) -> None:
    """Give the finished part its name, then tell `latest`."""
    directory = target.parent
    old = directory / f".{target.name}.old"
    replaces = target.exists()
    if replaces:
        disk.rename(target, old)
    disk.rename(part, target)
    disk.sync(directory)
    pointer = directory / f".{LATEST}.tmp"
    disk.write_text(pointer, target.name + "\n")
    disk.rename(pointer, directory / LATEST)
    disk.sync(directory)
    if replaces:
        disk.remove(old)


def _clear_leftovers(directory: Path, disk: Disk) -> None:
    """Undo what a killed save left half done."""
    for path in sorted(directory.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None:
            continue
        if match[2] == "old" and not (directory / match[1]).exists():
            disk.rename(path, directory / match[1])
        else:
            disk.remove(path)


def _candidates(directory: Path) -> Iterator[Path]:
    """Places to look for a checkpoint, best first."""
    if not directory.is_dir():
        return
    latest = directory / LATEST
    named = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
    if _STEP.fullmatch(named):
        yield _place(directory, named)
    names = {match[1] or match[0] for path in directory.iterdir() if (match := _name(path))}
    for name in sorted(names, key=_number, reverse=True):
        if name != named:
            yield _place(directory, name)


def _number(name: str) -> int:
    return int(name.removeprefix("step_"))


def _name(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"\.(step_\d+)\.old", path.name) or re.fullmatch(r"step_\d+()", path.name)


def _place(directory: Path, name: str) -> Path:
    """Where the checkpoint `name` is: between the two renames of a replacement, under its dotted name."""
    path = directory / name
    old = directory / f".{name}.old"
    return old if old.exists() and not path.exists() else path


def _problem(path: Path) -> str | None:
    """What is wrong with the checkpoint `path`, naming the file, or None."""
    manifest = _read_object(path / MANIFEST)
    if isinstance(manifest, str):
        return manifest
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(files, dict):
        return f"{MANIFEST} is not of format {FORMAT}; it was written by another version of relax_trio"
    return next((p for p in (_file_problem(path, name, size) for name, size in files.items()) if p), None)


def _file_problem(path: Path, name: str, size: JsonValue) -> str | None:
    file = path / name
    if not file.is_file():
        return f"{name} is missing"
    if file.stat().st_size != size:
        return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def _read_object(file: Path) -> JsonObject | str:
    """The JSON object in `file`, or what is wrong with it."""
    try:
        value = parse_json(file.read_bytes())
    except OSError as exc:
        return f"{file.name} cannot be read ({exc.strerror})"
    except ValueError as exc:
        return f"{file.name} is damaged ({exc})"
    return value if isinstance(value, dict) else f"{file.name} is damaged (not a JSON object)"


def _sizes(path: Path) -> dict[str, int]:
    return {
        file.relative_to(path).as_posix(): file.stat().st_size for file in sorted(path.rglob("*")) if file.is_file()
    }
