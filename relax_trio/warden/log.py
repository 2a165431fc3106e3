"""A log file that takes what a process tree writes and never grows beyond its limit. Standard library only.

The keeper owns it: the tree writes into a pipe, which the keeper empties into the file, so that a tree that floods its
output is neither blocked nor ended by it. What stays is the start and the newest part: whenever the limit is reached,
the middle of the file is cut out and a line in its place says how many bytes that were.
"""

from __future__ import annotations

import fcntl
import os

_F_GETPIPE_SZ = 1032  # fcntl has it from Python 3.10 on
_READ_BYTES = 1 << 16
_COPY_BYTES = 1 << 20
_LEFT_OUT = "\n[… {:>15} bytes left out …]\n"
_LEFT_OUT_BYTES = len(_LEFT_OUT.format(0).encode())


class BoundedLog:
    """The end of a process tree's output pipe, and the file it goes to.

    Attributes:
      writing: the descriptor that the process gets; close it with `hand_over` once it has it.
      reading: the descriptor to wait on for output; -1 once every writer is gone.
    """

    def __init__(self, path: str, limit: int) -> None:
        """Open both; what the file holds already stays.

        Args:
          limit: most bytes of the file, 1024 or more; half of it is kept when it is reached.

        Raises:
          OSError: the file cannot be opened; its name is in it.
        """
        assert limit >= 1024, "a limit leaves room for the line that tells of the cut"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.reading, self.writing = os.pipe2(os.O_CLOEXEC)
        except OSError:
            os.close(self._file)
            raise
        os.set_blocking(self.reading, False)
        self._limit = limit
        self._kept = limit // 4
        self._left_out = 0
        self._has_cut = False

    def hand_over(self) -> None:
        """The process has `writing`: close it here."""
        os.close(self.writing)
        self.writing = -1

    def pump(self) -> bool:
        """Move some of what was written to the file; False when there was nothing. Never blocks."""
        if self.reading < 0:
            return False
        try:
            data = os.read(self.reading, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._append(data)
        else:
            os.close(self.reading)
            self.reading = -1
        return bool(data)

    def drain(self) -> None:
        """Move all that is in the pipe by now; more that is written meanwhile may stay."""
        if self.reading < 0:
            return
        left = fcntl.fcntl(self.reading, _F_GETPIPE_SZ)
        while left > 0 and self.pump():
            left -= _READ_BYTES

    def close(self) -> None:
        """Drain and close; later output of a tree that could not be killed is lost."""
        self.drain()
        for fd in (self.reading, self._file):
            if fd >= 0:
                os.close(fd)
        self.reading = self._file = -1

    # --- the file ---------------------------------------------------------------------------------------------

    def _append(self, data: bytes) -> None:
        """Write `data` at the end of the file, cutting its middle out as often as needed; never raises."""
        try:
            while data:
                size = os.fstat(self._file).st_size
                if size >= self._limit:
                    size = self._cut(size)
                data = data[os.pwrite(self._file, data[: self._limit - size], size) :]
        except OSError:  # no space left: the tree must not suffer from it
            self._left_out += len(data)

    def _cut(self, size: int) -> int:
        """Keep a quarter of the limit from both ends; returns the new size.

        The newest part is in its new place before the file is made shorter: a reader of the end always finds it.
        """
        source, end = size - self._kept, self._kept + _LEFT_OUT_BYTES
        self._left_out += source - (end if self._has_cut else self._kept)
        while source < size and (piece := os.pread(self._file, min(_COPY_BYTES, size - source), source)):
            source += len(piece)
            end += os.pwrite(self._file, piece, end)
        os.pwrite(self._file, _LEFT_OUT.format(self._left_out).encode(), self._kept)
        os.ftruncate(self._file, end)
        self._has_cut = True
        return end
