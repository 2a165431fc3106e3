"""The warden's main loop: forks keepers on order, passes their reports on, and outlives nothing it owns.

Single-threaded, standard library only. It ends in one way: its stream from the engine closes, or the engine's process
is gone; then it kills all its descendants and exits. Signals that a terminal or a supervisor sends are ignored: the
engine decides. What a keeper that was itself killed leaves behind falls to the warden and is killed at once.

Every keeper is a child of the warden, those that a warm parent forks too (warm.py): nothing that happens to their warm
parent afterwards touches them.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import select
import signal
import socket

from relax_trio.warden.charge import PARENT_ENDED, Keeper, WarmParent
from relax_trio.warden.keeper import exec_warm_parent, ignore_signals, run_keeper, spawn_leader
from relax_trio.warden.tree import (
    Reaper,
    become_subreaper,
    children_of,
    drain,
    hurry_up,
    kill_descendants,
    open_child_alarm,
    send,
)
from relax_trio.warden.wire import MAX_PACKET_BYTES, Unpacker, pack, send_order

TYPE_CHECKING = False
if TYPE_CHECKING:
    from relax_trio.warden.wire import Order, Report


def main(engine_fd: int, engine_pid: int) -> None:
    """Run the warden on its end of the engine's socket pair until the engine closes the other or dies."""
    ignore_signals()
    os.set_inheritable(engine_fd, False)
    become_subreaper("relax-warden")
    alarm = open_child_alarm()
    gc.disable()
    gc.freeze()  # keepers share these pages
    try:
        Warden(socket.socket(fileno=engine_fd), engine_pid, alarm).serve()
    finally:
        hurry_up()
        Reaper().kill_all(alarm)


class Warden:
    """The state of the warden."""

    def __init__(self, engine: socket.socket, engine_pid: int, alarm: int) -> None:
        self._engine = engine
        self._pid = os.getpid()
        self._engine_pidfd = os.pidfd_open(engine_pid)
        self._alarm = alarm
        self._unpacker = Unpacker()
        self._by_fd: dict[int, Keeper] = {}  # by descriptor of their control socket
        self._by_ident: dict[int, Keeper] = {}
        self._by_pid: dict[int, Keeper] = {}  # the children that are no orphans
        self._lost: list[Keeper] = []  # ended without a last word; what they kept is being killed
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
                    elif fd in self._by_fd:
                        self._hear(self._by_fd[fd])
        except (BrokenPipeError, ConnectionResetError):
            return  # the engine went while it was being told something

    # --- orders -----------------------------------------------------------------------------------------------

    def _take_orders(self) -> bool:
        data = self._engine.recv(1 << 16)
        for body in self._unpacker.feed(data):
            order: Order = json.loads(body)
            if order["op"] == "end":
                self._end(order)
            elif "warm" in order:
                self._queue(order)
            else:
                self._fork(order)
        return bool(data)

    def _fork(self, order: Order) -> None:
        """Fork a keeper for the process, or what becomes the warm parent."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
        except OSError as exc:  # out of descriptors, processes or memory
            self._report({"event": "failed", "id": order["id"], "errno": exc.errno or 0, "what": "fork"})
            return
        is_warm = order["op"] == "warm"
        if pid == 0 and is_warm:
            exec_warm_parent(theirs, order, self._pid)
        elif pid == 0:
            run_keeper(theirs, order, spawn_leader)
        theirs.close()
        keeper = WarmParent(order["id"], ours) if is_warm else Keeper(order["id"], ours)
        keeper.pid = pid
        self._by_pid[pid] = keeper
        self._enlist(keeper)
        if is_warm and not self._send(keeper, order):
            send(pid, signal.SIGKILL)

    def _queue(self, order: Order) -> None:
        """Have a warm parent fork the keeper and its process, when it is done with those before."""
        parent = self._find(order["warm"])
        if not isinstance(parent, WarmParent):
            self._tell_stillborn(order["id"], PARENT_ENDED)
            return
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as exc:
            self._report({"event": "failed", "id": order["id"], "errno": exc.errno or 0, "what": "socketpair"})
            return
        self._enlist(Keeper(order["id"], ours, parent))
        parent.waiting.append((order, theirs))
        if parent in self._lost:
            parent.withdraw(order["id"])
        self._feed(parent)

    def _enlist(self, keeper: Keeper) -> None:
        self._by_fd[keeper.control.fileno()] = self._by_ident[keeper.ident] = keeper
        self._epoll.register(keeper.control, select.EPOLLIN)

    def _feed(self, parent: WarmParent) -> None:
        """Send the next order that waits for an idle warm parent."""
        while parent.waiting and not parent.is_busy:
            order, theirs = parent.waiting.popleft()
            parent.is_busy = self._send(self._by_ident[order["id"]], order, theirs)
            theirs.close()

    def _send(self, keeper: Keeper, order: Order, *control: socket.socket) -> bool:
        """Send a warm parent its order; False when that failed, which is told, or it is gone, which is noticed next."""
        try:
            send_order((keeper.parent or keeper).control, order, *(end.fileno() for end in control))
        except (BrokenPipeError, ConnectionResetError):
            return False
        except OSError as exc:
            self._tell(keeper, {"event": "failed", "id": keeper.ident, "errno": exc.errno or 0, "what": "warm parent"})
            return False
        return True

    def _end(self, order: Order) -> None:
        """Pass the order on to its keeper; one that is done has no use for it."""
        keeper = self._by_ident.get(order["id"])
        if keeper is None:
            return
        if isinstance(keeper, WarmParent):
            if keeper.pid in self._by_pid:
                send(keeper.pid, signal.SIGKILL)
        elif keeper.parent is not None and keeper.parent.withdraw(keeper.ident):
            self._tell(keeper, {"event": "failed", "id": keeper.ident, "errno": errno.ECANCELED, "what": "order"})
        else:
            try:
                keeper.control.send(json.dumps(order).encode())
            except OSError:
                pass  # done, or killed: its end is told once it is noticed

    # --- reports ----------------------------------------------------------------------------------------------

    def _hear(self, keeper: Keeper) -> None:
        """Take a keeper's report, or notice its end."""
        try:
            body = keeper.control.recv(MAX_PACKET_BYTES)
        except ConnectionResetError:  # it went without reading its last order; what it said comes next
            return
        if not body:
            self._forget(keeper)
            return
        report: Report = json.loads(body)
        if report["event"] == "forked":
            self._adopt(keeper, report)
        elif keeper.pid != 0:  # else its warm parent died before it was known here: an orphan, and killed
            self._tell(self._find(report["id"]), report)
            self._go_on(keeper)

    def _adopt(self, parent: Keeper, report: Report) -> None:
        """A warm parent forked this keeper: take it as a child, then let it become one."""
        keeper = self._find(report["id"])
        assert keeper is not None, "its end is told by its warm parent or after this"
        keeper.pid = report["pid"]
        self._by_pid[keeper.pid] = keeper
        try:
            parent.control.send(b"{}")
        except OSError:
            return  # its end is noticed next
        self._go_on(parent)

    def _go_on(self, parent: Keeper) -> None:
        if isinstance(parent, WarmParent):
            parent.is_busy = False
            self._feed(parent)

    def _find(self, ident: int) -> Keeper | None:
        """What is known of a process whose end was not told yet."""
        return self._by_ident.get(ident) or next((lost for lost in self._lost if lost.ident == ident), None)

    def _tell(self, keeper: Keeper | None, report: Report) -> None:
        if keeper is None:
            return  # its end was told
        keeper.has_spawned |= report["event"] == "spawned"
        keeper.has_exited |= report["event"] == "exited"
        keeper.is_done |= report["event"] in ("ended", "failed", "refused")
        if keeper.is_done and keeper in self._lost:
            self._lost.remove(keeper)
        self._report(report)

    def _forget(self, keeper: Keeper) -> None:
        """A keeper closed its socket: done, or killed."""
        self._epoll.unregister(keeper.control)
        del self._by_fd[keeper.control.fileno()], self._by_ident[keeper.ident]
        keeper.control.close()
        if isinstance(keeper, WarmParent):
            for _, theirs in keeper.waiting:
                theirs.close()  # their keepers' sockets end as well
        if not keeper.is_done:
            self._lost.append(keeper)
            self._reap()

    def _reap(self) -> None:
        """Collect dead children; kill the orphans that dead keepers left, and tell of their end."""
        has_orphans = False
        for pid in children_of(os.getpid()):
            changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if changed and not os.WIFSTOPPED(status):
                if (keeper := self._by_pid.pop(pid, None)) is not None:
                    keeper.status = status
            elif pid not in self._by_pid:
                has_orphans = True
            elif changed:
                send(pid, signal.SIGCONT)  # an agent stopped its parent, which must go on listening
        if has_orphans:
            kill_descendants(spare=self._by_pid.keys())
            return
        # A process's sockets close before its children are handed on: only a collected keeper has left all it kept.
        # Warm parents first: nobody shall hear of a fork that failed and ask the same parent for another.
        for keeper in sorted(self._lost, key=lambda lost: lost.parent is not None):
            if keeper.pid not in self._by_pid and not keeper.is_expected():
                self._tell_lost(keeper)

    def _tell_lost(self, keeper: Keeper) -> None:
        """Tell of the end of a process whose keeper did not."""
        self._lost.remove(keeper)
        keeper.is_done = True
        if not keeper.has_spawned:
            self._tell_stillborn(keeper.ident, keeper.why_stillborn())
            return
        if not keeper.has_exited:
            exited: Report = {"event": "exited", "id": keeper.ident}
            exited.update(keeper.how_ended())
            self._report(exited)
        self._report({"event": "ended", "id": keeper.ident, "survivors": 0, "seconds": 0.0})

    def _tell_stillborn(self, ident: int, why: str) -> None:
        self._report({"event": "failed", "id": ident, "errno": errno.ESRCH, "what": "", "why": why})

    def _report(self, report: Report) -> None:
        self._engine.sendall(pack(report))
