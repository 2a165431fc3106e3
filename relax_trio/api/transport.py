"""One connection of the server, watched: whether its client is gone, and whether a write to it failed.

Hypercorn tells its application neither. A write to a broken socket fails silently there, and a disconnect is told by a
message that comes after every response as well. But whether a reply arrived decides what a Session may export, and
clients do close in the very moment in which their last byte is written.
"""

from __future__ import annotations

import socket

import trio


class Transport:
    """A byte stream to one client, as Hypercorn uses it.

    Attributes:
      is_gone: the client's end of stream, or an error in its place, has been read.
      has_failed: a write failed; bytes of it may not have been taken.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.socket = stream.socket
        self.is_gone = False
        self.has_failed = False

    async def send_all(self, data: bytes) -> None:
        """Hand `data` to the kernel. Once this returns, all of it has been taken.

        Raises:
          trio.BrokenResourceError, trio.ClosedResourceError: it has not.
        """
        try:
            await self._stream.send_all(data)
        except BaseException:
            self.has_failed = True
            raise

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Read what is there; b"" at the end of the stream."""
        try:
            data = await self._stream.receive_some(max_bytes)
        except trio.BrokenResourceError:
            self.is_gone = True
            raise
        self.is_gone = self.is_gone or not data
        return data

    async def send_eof(self) -> None:
        """Tell the client that nothing more comes."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()

    def cut(self) -> None:
        """End the connection under whoever still uses it; reads and writes in progress fail at once."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already
