"""One keeper stands between the warden and one agent: a fork of the warden, itself a child subreaper.

Because every orphan of the agent's tree falls to its keeper, the tree is known exactly, whatever sessions, groups and
environments its members gave themselves. The keeper starts the leader, tells how it ended, ends the tree when told to,
and kills it at once when the warden is gone. Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import sys
import time

from relax_trio.warden.tree import Reaper, become_subreaper, drain, open_child_alarm, terminate_descendants
from relax_trio.warden.wire import MAX_PACKET_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from relax_trio.warden.wire import Order, Report

_MAX_WHAT_LEN = 1000  # keeps a report below MAX_PACKET_BYTES however it is escaped


def run_keeper(control: socket.socket, order: Order) -> NoReturn:
    """Be the keeper of the process that `order` describes. Never returns; called right after a fork.

    Args:
      control: sequenced-packet socket to the warden, one JSON message a packet; its end means that the warden is gone.
    """
    try:
        _close_inherited(control.fileno())
        keeper = Keeper(control, order["id"])
        try:
            keeper.keep(order)
        finally:
            keeper.kill()  # after a bug as well: the warden may be gone
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        os._exit(0)  # never back into the warden's loop


def _close_inherited(kept: int) -> None:
    """Close the warden's descriptors: a copy of another keeper's socket would hide the warden's end from it."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != kept:
            os.closerange(fd, fd + 1)  # unlike close, silent about the descriptor that listed the directory


class Keeper:
    """The loop of one keeper."""

    def __init__(self, control: socket.socket, ident: int) -> None:
        self._control = control
        self._id = ident
        self._alarm = open_child_alarm()
        self._reaper = Reaper()
        self._has_told_exit = False

    def keep(self, order: Order) -> None:
        """Start the process, then serve until its tree is ended."""
        become_subreaper("relax-keeper")
        try:
            self._reaper.leader = start_process(order)
        except OSError as exc:
            self._fail(exc.errno or errno.EIO, str(exc.filename or ""))
            return
        except ValueError as exc:  # a NUL inside, or a name with "="
            self._fail(errno.EINVAL, str(exc))
            return
        self._report({"event": "spawned", "id": self._id, "pid": self._reaper.leader})
        grace_s = self._wait_end_order()
        started = time.monotonic()
        if grace_s > 0:
            self._wait_gone(grace_s)
        survivors = self.kill()
        seconds = time.monotonic() - started
        self._report({"event": "ended", "id": self._id, "survivors": survivors, "seconds": seconds})

    def _fail(self, number: int, what: str) -> None:
        self._report({"event": "failed", "id": self._id, "errno": number, "what": what[:_MAX_WHAT_LEN]})

    def _wait_end_order(self) -> float:
        """Tell of the leader's exit; returns the grace, in seconds, once the tree shall end (0: the warden is gone)."""
        while True:
            for ready in self._wait(None):
                if ready == self._control.fileno():
                    return self._take_order()
            self._reap()

    def _take_order(self) -> float:
        try:
            body = self._control.recv(MAX_PACKET_BYTES)
        except ConnectionResetError:  # the warden died with reports of ours unread
            body = b""
        return float(json.loads(body)["grace_s"]) if body else 0.0

    def _wait_gone(self, grace_s: float) -> None:
        """Ask the tree to end and wait until it did, for at most `grace_s`; a further order cuts the wait short."""
        deadline = time.monotonic() + grace_s
        if self._reap():
            terminate_descendants()
        while self._reap() and (left_s := deadline - time.monotonic()) > 0:
            if self._control.fileno() in self._wait(left_s):
                return

    def kill(self) -> int:
        """Kill until nothing is left, the leader's zombie last. Returns how many could not be killed."""
        survivors = self._reaper.kill_all(self._alarm)
        self._tell_exit()
        if survivors == 0:
            self._reaper.reap_leader()
            survivors = self._reaper.kill_all(self._alarm)
        return survivors

    def _wait(self, timeout_s: float | None) -> list[int]:
        """Wait for a child's death or the warden; returns the descriptors that are ready."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._alarm, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]
        if self._alarm in ready:
            drain(self._alarm)
        return ready

    def _reap(self) -> list[int]:
        living = self._reaper.reap()
        self._tell_exit()
        return living

    def _tell_exit(self) -> None:
        """Report the leader's exit once."""
        if self._reaper.leader_exit is not None and not self._has_told_exit:
            self._has_told_exit = True
            kind, number = self._reaper.leader_exit
            report: Report = {"event": "exited", "id": self._id}
            if kind == "code":
                report["code"] = number
            else:
                report["signal"] = number
            self._report(report)

    def _report(self, report: Report) -> None:
        try:
            self._control.send(json.dumps(report).encode())
        except OSError:
            pass  # the warden is gone: nobody is left to be told


def start_process(order: Order) -> int:
    """Start the process in a new session, without descriptors but 0, 1 and 2, with default signal actions.

    Returns:
      Its pid.

    Raises:
      OSError: with the file name it failed on.
    """
    os.chdir(order["cwd"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, log, 1),
        (os.POSIX_SPAWN_DUP2, log, 2),
    ]
    argv = order["argv"]
    try:
        return os.posix_spawnp(
            argv[0],
            argv,
            order["env"],
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=[number for number in range(1, 32) if number not in (signal.SIGKILL, signal.SIGSTOP)],
        )
    finally:
        os.close(log)
        os.chdir("/")
