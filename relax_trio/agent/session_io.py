"""The IO directory of one Session: made, filled, read, and at the end removed or kept.

It knows no process. Small files are handled in place; what may be long goes to a worker thread.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import trio
from attrs import define

from relax_trio.agent.environment import INPUT_NAME, OUTPUT_NAME
from relax_trio.data.json import JsonObject
from relax_trio.errors import AgentOutputError
from relax_trio.events import emit
from relax_trio.ids import PlaceId

_T = TypeVar("_T")

LOG_NAME: Final = "run.log"

TAIL_BYTES: Final = 8 * 1024
"""Most of run.log that an error shows."""

LONG_BYTES: Final = 1 << 20
"""Files from this size on are read and written in a worker thread."""

MAX_OUTPUT_BYTES: Final = 256 << 20
"""Largest `session_output.json` that is read."""

_MAX_PLAIN_FILES: Final = 16
"""A directory with more entries than this is removed in a worker thread."""


@define(eq=False)
class SessionIO:
    """One IO directory.

    Attributes:
      path: the directory, mode 0700, absolute.
      place: the Session's public name.
    """

    path: Path
    place: PlaceId

    @classmethod
    async def make(cls, root: Path, place: PlaceId, session_input: JsonObject) -> SessionIO:
        """Make the directory below `root`, an absolute path, and write `session_input.json`.

        Raises:
          OSError: it could not be made or filled; nothing is left of it.
        """
        path = Path(tempfile.mkdtemp(prefix=f"{file_name(place)}-", dir=root))
        io = cls(path, place)
        try:
            data = json_bytes(session_input)
            if len(data) < LONG_BYTES:
                (path / INPUT_NAME).write_bytes(data)
            else:
                await trio.to_thread.run_sync((path / INPUT_NAME).write_bytes, data)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return io

    @property
    def log_path(self) -> Path:
        """The file that takes the agent's stdout and stderr."""
        return self.path / LOG_NAME

    def log_tail(self, secret: str = "") -> str:
        """The last `TAIL_BYTES` of run.log, undecodable bytes replaced; empty when there is none.

        Args:
          secret: blotted out wherever it stands, cut in two by the tail's start included.
        """
        hidden = secret.encode()
        margin = max(0, len(hidden) - 1)
        try:
            with self.log_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = max(0, size - TAIL_BYTES - margin)
                file.seek(start)
                data = file.read(TAIL_BYTES + margin)
        except OSError:
            return ""
        if hidden:
            data = data.replace(hidden, b"<session id>")
        if start > 0:
            data = data[margin:]
        return data[-TAIL_BYTES:].decode("utf-8", "replace")

    async def read_output(self, parse: Callable[[bytes], _T]) -> _T:
        """Read `session_output.json` and parse it; a missing file is an empty one.

        Raises:
          AgentOutputError: it is no regular file, too large or unreadable.
        """
        path = self.path / OUTPUT_NAME
        try:
            status = path.stat()
        except FileNotFoundError:
            return parse(b"")
        except OSError as exc:
            raise self._unreadable(str(exc)) from exc
        if not stat.S_ISREG(status.st_mode):
            raise self._unreadable("it is no regular file")
        if status.st_size > MAX_OUTPUT_BYTES:
            raise self._unreadable(f"its {status.st_size} bytes are over the limit of {MAX_OUTPUT_BYTES}")
        try:
            if status.st_size < LONG_BYTES:
                return parse(path.read_bytes())
            return await trio.to_thread.run_sync(lambda: parse(path.read_bytes()))
        except OSError as exc:
            raise self._unreadable(str(exc)) from exc

    def _unreadable(self, why: str) -> AgentOutputError:
        return AgentOutputError(f"session {self.place}: session_output.json cannot be read: {why}")

    async def remove(self) -> None:
        """Remove the directory with everything in it. What cannot be removed is told as `session_dir.left`.

        Cancellation: a removal that went to a worker thread is waited for.
        """
        if self._remove_plain():
            return
        await trio.to_thread.run_sync(_remove_tree, self.path)
        if self.path.exists():
            emit("session_dir.left", place=self.place, path=str(self.path))

    def _remove_plain(self) -> bool:
        """The usual case in place: a few files and nothing else."""
        try:
            with os.scandir(self.path) as scan:
                entries = [
                    (entry.path, entry.is_dir(follow_symlinks=False))
                    for entry, _ in zip(scan, range(_MAX_PLAIN_FILES + 1), strict=False)
                ]
            if len(entries) > _MAX_PLAIN_FILES or any(is_dir for _, is_dir in entries):
                return False
            for path, _ in entries:
                os.unlink(path)
            self.path.rmdir()
        except FileNotFoundError:
            return not self.path.exists()
        except OSError:
            return False
        return True

    async def keep(self, directory: Path) -> Path | None:
        """Move the directory to `directory/<place>`, or `<place>-2`, `-3`, … where that is taken.

        Returns:
          Where it is now; None when it could not be moved, told as `session_dir.left`.

        Cancellation: a move across file systems runs in a worker thread and is waited for.
        """
        try:
            target = _reserve(directory, file_name(self.place))
            try:
                os.rename(self.path, target)  # onto the empty directory that holds the name
            except OSError:
                await trio.to_thread.run_sync(_move_tree, self.path, target)
        except (OSError, shutil.Error) as exc:
            emit("session_dir.left", place=self.place, path=str(self.path), error=str(exc))
            return None
        return target


_COPIED_KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)


def file_name(place: PlaceId) -> str:
    """`place` as a file name: "G17/2" → "G17_2"."""
    return place.replace("/", "_")


def json_bytes(value: JsonObject) -> bytes:
    """`value` as readable UTF-8 JSON; escaped where a lone surrogate cannot be encoded."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False).encode()


def _reserve(directory: Path, name: str) -> Path:
    """Make an empty directory with the first free name."""
    directory.mkdir(parents=True, exist_ok=True)
    n = 1
    while True:
        target = directory / (name if n == 1 else f"{name}-{n}")
        try:
            target.mkdir(mode=0o700)
        except FileExistsError:
            n += 1
        else:
            return target


def _remove_tree(path: Path) -> None:
    """Remove a tree, also below directories that their owner made unreadable; leaves what it may not remove."""
    _open_up(path)
    for directory, names, _ in os.walk(path):  # top-down: a directory is opened before it is walked
        for name in names:
            _open_up(os.path.join(directory, name))
    shutil.rmtree(path, ignore_errors=True)


def _open_up(directory: str | Path) -> None:
    try:
        if not os.path.islink(directory):
            os.chmod(directory, 0o700)
    except OSError:
        pass  # another user's; the caller tells what could not be removed


def _move_tree(source: Path, target: Path) -> None:
    """Copy, then remove: `target` is an empty directory on another file system."""
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=_special_files)
    _remove_tree(source)


def _special_files(directory: str, names: list[str]) -> list[str]:
    """Sockets, pipes and devices, which cannot be copied."""
    return [name for name in names if stat.S_IFMT(os.lstat(os.path.join(directory, name)).st_mode) not in _COPIED_KINDS]
