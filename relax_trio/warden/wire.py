"""The messages between the engine and the warden, and their framing.

A message is a JSON object; on the engine's stream it is led by its length (4 bytes, big-endian). Undecodable bytes in
paths and variables travel as lone surrogates, which JSON escapes. Standard library only; the engine's side uses it too.

Orders, engine → warden:
  spawn  id, argv, cwd, env, log   start a process in a session of its own, its output appended to the file `log`;
         log_bytes                 optional: what that file holds at most;
         warm                      optional: id of the warm parent whose fork becomes `argv`, a Python and its script
  warm   id, argv, cwd, env, log   start a warm parent by `argv`, which ends in a call of warm_main.py;
         command, modules          what its forks run, which decides where modules are found; what it imports
  end    id, grace_s               end its whole tree: SIGTERM, grace, SIGKILL (a warm parent: SIGKILL)
Closing the stream is the order to kill everything at once and exit.

Reports, warden → engine:
  ready                            the warden is set up
  spawned  id, pid                 a warm parent: it has its modules imported
  failed   id, errno, what, why    nothing was started; `what` is the path it failed on, `why` says more than errno
  refused  id, why                 a warm parent could not import a module, or may not fork with it
  exited   id, code | signal       the leader ended; it stays a zombie until its tree is ended, so its pid stays its own
  ended    id, survivors, seconds  nothing is left of the tree (survivors could not be killed)

Between the warden and what it forked, messages travel as packets without framing. A warm parent gets its orders one at
a time, each in a memory file of any length that comes with the packet, next to the control socket of the keeper to be
forked. It answers `forked  id, pid` when that keeper exists, and lets it become the warden's child once it is answered.
"""

from __future__ import annotations

import json
import os
import socket

TYPE_CHECKING = False  # the typing module costs the warden a tenth of its size
if TYPE_CHECKING:
    from typing import Literal, TypedDict

    class Order(TypedDict, total=False):
        """A message to the warden."""

        op: Literal["spawn", "warm", "end"]
        id: int
        argv: list[str]
        cwd: str
        env: dict[str, str]
        log: str
        log_bytes: int
        warm: int
        command: list[str]
        modules: list[str]
        grace_s: float

    class Report(TypedDict, total=False):
        """A message from the warden."""

        event: Literal["ready", "spawned", "failed", "refused", "exited", "ended", "forked"]
        id: int
        pid: int
        errno: int
        what: str
        why: str
        code: int
        signal: int
        survivors: int
        seconds: float


MAX_PACKET_BYTES = 1 << 14
"""Longest message between the warden and a keeper, which travel as packets without framing."""

MAX_TEXT_LEN = 1000
"""Most characters of a text in a report: keeps it below MAX_PACKET_BYTES however it is escaped."""

_LENGTH_BYTES = 4


def pack(message: Order | Report) -> bytes:
    """Frame one message for the stream."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def send_order(parent: socket.socket, order: Order, *control: int) -> None:
    """Hand a warm parent an order, and for a spawn the descriptor of its keeper's end of the control socket.

    Raises:
      OSError: it is gone, or there is no memory or descriptor left for it.
    """
    memory = os.memfd_create("order", os.MFD_CLOEXEC)
    with open(memory, "wb") as file:
        file.write(json.dumps(order).encode())
        file.flush()
        socket.send_fds(parent, [b"order"], [memory, *control])


def receive_order(parent: socket.socket) -> tuple[Order, list[int]] | None:
    """What `send_order` sent: the order and the control descriptor, if any; None when the warden is gone."""
    try:
        body, fds, _, _ = socket.recv_fds(parent, MAX_PACKET_BYTES, 2)
    except ConnectionResetError:  # the warden died with something of ours unread
        return None
    if not body:
        return None
    with open(fds[0], "rb") as file:
        file.seek(0)
        order: Order = json.loads(file.read())
    for fd in fds[1:]:
        os.set_inheritable(fd, False)
    return order, fds[1:]


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
