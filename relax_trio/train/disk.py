"""The few file-system steps a checkpoint is made of, each of them durable before the next begins."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


class Disk:
    """The real file system. Tests put another in its place that dies at a chosen step."""

    def make_dir(self, path: Path) -> None:
        """Make a directory and its parents."""
        path.mkdir(parents=True, exist_ok=True)

    def fill(self, path: Path, payload: Callable[[Path], None]) -> None:
        """Let `payload` write its files into the directory `path`."""
        payload(path)

    def write_text(self, path: Path, text: str) -> None:
        """Write a file and force it to the disk."""
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def sync_tree(self, path: Path) -> None:
        """Force every file and directory under `path` to the disk."""
        for item in [*path.rglob("*"), path]:
            self.sync(item)

    def sync(self, path: Path) -> None:
        """Force a file's content, or a directory's entries, to the disk."""
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename atomically. An existing file is replaced; an existing directory must be empty."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file or a whole directory."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
