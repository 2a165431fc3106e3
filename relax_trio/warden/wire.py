"""The messages between the engine and the warden, and their framing.

A message is a JSON object; on the engine's stream it is led by its length (4 bytes, big-endian). Undecodable bytes in
paths and variables travel as lone surrogates, which JSON escapes. Standard library only; the engine's side uses it too.

Orders, engine → warden:
  spawn  id, argv, cwd, env, log   start a process in a session of its own, its output appended to the file `log`
  end    id, grace_s               end its whole tree: SIGTERM, grace, SIGKILL
Closing the stream is the order to kill everything at once and exit.

Reports, warden → engine:
  ready                            the warden is set up
  spawned  id, pid
  failed   id, errno, what         nothing was started; `what` is the path it failed on
  exited   id, code | signal       the leader ended; it stays a zombie until its tree is ended, so its pid stays its own
  ended    id, survivors, seconds  nothing is left of the tree (survivors could not be killed)
"""

from __future__ import annotations

import json

TYPE_CHECKING = False  # the typing module costs the warden a tenth of its size
if TYPE_CHECKING:
    from typing import Literal, TypedDict

    class Order(TypedDict, total=False):
        """A message to the warden."""

        op: Literal["spawn", "end"]
        id: int
        argv: list[str]
        cwd: str
        env: dict[str, str]
        log: str
        grace_s: float

    class Report(TypedDict, total=False):
        """A message from the warden."""

        event: Literal["ready", "spawned", "failed", "exited", "ended"]
        id: int
        pid: int
        errno: int
        what: str
        code: int
        signal: int
        survivors: int
        seconds: float


MAX_PACKET_BYTES = 1 << 14
"""Longest message between the warden and a keeper, which travel as packets without framing."""

_LENGTH_BYTES = 4


def pack(message: Order | Report) -> bytes:
    """Frame one message for the stream."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class Unpacker:
    """Cuts a stream of bytes into message bodies (JSON text)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes of the stream; returns the bodies that are complete with them."""
        self._buffer += data
        bodies = []
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[_LENGTH_BYTES:end]))
            del self._buffer[:end]
        return bodies
