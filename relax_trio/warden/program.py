"""The warden's main loop: forks keepers on order, passes their reports on, and outlives nothing it owns.

Single-threaded, standard library only. It ends in one way: its stream from the engine closes, or the engine's process
is gone; then it kills all its descendants and exits. Signals that a terminal or a supervisor sends are ignored: the
engine decides. What a keeper that was itself killed leaves behind falls to the warden and is killed at once.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket

from relax_trio.warden.keeper import run_keeper
from relax_trio.warden.tree import (
    Reaper,
    become_subreaper,
    children_of,
    drain,
    kill_descendants,
    open_child_alarm,
    send,
)
from relax_trio.warden.wire import MAX_PACKET_BYTES, Unpacker, pack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from relax_trio.warden.wire import Order, Report

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main(engine_fd: int, engine_pid: int) -> None:
    """Run the warden on its end of the engine's socket pair until the engine closes the other or dies."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(engine_fd, False)
    become_subreaper("relax-warden")
    alarm = open_child_alarm()
    gc.disable()
    gc.freeze()  # keepers share these pages
    try:
        Warden(socket.socket(fileno=engine_fd), engine_pid, alarm).serve()
    finally:
        Reaper().kill_all(alarm)


class _Keeper:
    """What the warden knows of a keeper."""

    def __init__(self, ident: int, pid: int, control: socket.socket) -> None:
        self.ident = ident
        self.pid = pid
        self.control = control
        self.has_exited = False  # the exit of its leader was told
        self.is_done = False  # its last report was told


class Warden:
    """The state of the warden."""

    def __init__(self, engine: socket.socket, engine_pid: int, alarm: int) -> None:
        self._engine = engine
        self._engine_pidfd = os.pidfd_open(engine_pid)
        self._alarm = alarm
        self._unpacker = Unpacker()
        self._keepers: dict[int, _Keeper] = {}  # by descriptor of their control socket
        self._by_ident: dict[int, _Keeper] = {}
        self._keeper_pids: set[int] = set()
        self._lost: list[_Keeper] = []  # killed by someone else; what they kept is being killed
        self._epoll = select.epoll()
        for fd in (engine.fileno(), self._engine_pidfd, alarm):
            self._epoll.register(fd, select.EPOLLIN)

    def serve(self) -> None:
        """Serve orders until the engine is gone."""
        try:
            self._report({"event": "ready"})
            while True:
                for fd, _ in self._epoll.poll():
                    if fd == self._engine_pidfd:
                        return
                    if fd == self._engine.fileno():
                        if not self._take_orders():
                            return
                    elif fd == self._alarm:
                        drain(self._alarm)
                        self._reap()
                    elif fd in self._keepers:
                        self._hear(self._keepers[fd])
        except (BrokenPipeError, ConnectionResetError):
            return  # the engine went while it was being told something

    def _take_orders(self) -> bool:
        data = self._engine.recv(1 << 16)
        for body in self._unpacker.feed(data):
            order: Order = json.loads(body)
            if order["op"] == "spawn":
                self._spawn(order)
            else:
                self._pass_on(order)
        return bool(data)

    def _spawn(self, order: Order) -> None:
        """Fork a keeper for the process."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
        except OSError as exc:  # out of descriptors, processes or memory
            self._report({"event": "failed", "id": order["id"], "errno": exc.errno or 0, "what": "fork"})
            return
        if pid == 0:
            run_keeper(theirs, order)
        theirs.close()
        keeper = _Keeper(order["id"], pid, ours)
        self._keepers[ours.fileno()] = self._by_ident[keeper.ident] = keeper
        self._keeper_pids.add(pid)
        self._epoll.register(ours, select.EPOLLIN)

    def _pass_on(self, order: Order) -> None:
        """Hand an order to its keeper; one that is done has no use for it."""
        keeper = self._by_ident.get(order["id"])
        if keeper is not None:
            try:
                keeper.control.send(json.dumps(order).encode())
            except OSError:
                pass  # done, or killed: its end is told once it is noticed

    def _hear(self, keeper: _Keeper) -> None:
        """Pass on a keeper's report, or notice its end."""
        try:
            body = keeper.control.recv(MAX_PACKET_BYTES)
        except ConnectionResetError:  # it went without reading its last order
            body = b""
        if not body:
            self._epoll.unregister(keeper.control)
            del self._keepers[keeper.control.fileno()], self._by_ident[keeper.ident]
            keeper.control.close()
            if not keeper.is_done:
                self._lost.append(keeper)
                self._reap()
            return
        report: Report = json.loads(body)
        keeper.has_exited |= report["event"] == "exited"
        keeper.is_done |= report["event"] in ("ended", "failed")
        self._report(report)

    def _reap(self) -> None:
        """Collect dead children; kill the orphans that dead keepers left, and tell of their end."""
        has_orphans = False
        for pid in children_of(os.getpid()):
            changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if changed and not os.WIFSTOPPED(status):
                self._keeper_pids.discard(pid)
            elif pid not in self._keeper_pids:
                has_orphans = True
            elif changed:
                send(pid, signal.SIGCONT)  # an agent stopped its parent, which must go on listening
        if has_orphans:
            kill_descendants(spare=self._keeper_pids)
            return
        # A process's sockets close before its children are handed on: only a collected keeper has left all it kept.
        for keeper in [lost for lost in self._lost if lost.pid not in self._keeper_pids]:
            self._lost.remove(keeper)
            if not keeper.has_exited:
                self._report({"event": "exited", "id": keeper.ident, "signal": int(signal.SIGKILL)})
            self._report({"event": "ended", "id": keeper.ident, "survivors": 0, "seconds": 0.0})

    def _report(self, report: Report) -> None:
        self._engine.sendall(pack(report))
