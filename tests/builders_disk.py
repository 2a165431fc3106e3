"""Disks that die: a file system in which a process is killed at a chosen step."""

from __future__ import annotations

from relax_trio.train.disk import Disk


class KilledError(BaseException):
    """The process is gone: nothing after this reaches the disk."""


class FastDisk(Disk):
    """Doesn't wait for the platter: a killed process loses nothing that it wrote."""

    def write_text(self, path, text):
        path.write_text(text)

    def sync(self, path):
        pass


class DyingDisk(FastDisk):
    """Dies at its step `fatal`: before, half-way through, or right after it."""

    def __init__(self, fatal, how):
        self.left = fatal
        self.how = how
        self.dead = False

    def _step(self, work, half):
        assert not self.dead, "a dead process touched the disk"
        if self.left > 0:
            self.left -= 1
            return work()
        self.dead = True
        {"before": lambda: None, "half": half, "after": work}[self.how]()
        raise KilledError

    def make_dir(self, path):
        self._step(lambda: Disk.make_dir(self, path), lambda: path.parent.mkdir(parents=True, exist_ok=True))

    def fill(self, path, payload):
        payload(path)

    def write_text(self, path, text):
        self._step(lambda: FastDisk.write_text(self, path, text), lambda: path.write_text(text[: len(text) // 2]))

    def sync(self, path):
        self._step(lambda: None, lambda: None)

    def rename(self, source, target):
        self._step(lambda: Disk.rename(self, source, target), lambda: None)

    def remove(self, path):
        def half():
            files = [p for p in sorted(path.rglob("*")) if p.is_file()]  # an empty directory has no half
            if files:
                files[0].unlink()

        self._step(lambda: Disk.remove(self, path), half)
