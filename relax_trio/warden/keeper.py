"""One keeper stands between the warden and one agent: a fork of the warden or of a warm parent, itself a subreaper.

Because every orphan of the agent's tree falls to its keeper, the tree is known exactly, whatever sessions, groups and
environments its members gave themselves. The keeper starts the leader, takes its output where that is bounded, tells
how it ended, ends the tree when told to, and kills it at once when the warden is gone. Standard library only.
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

from relax_trio.warden.log import BoundedLog
from relax_trio.warden.tree import (
    Reaper,
    become_subreaper,
    die_with_parent,
    drain,
    hurry_up,
    open_child_alarm,
    terminate_descendants,
)
from relax_trio.warden.wire import MAX_PACKET_BYTES, MAX_TEXT_LEN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from relax_trio.warden.wire import Order, Report

    Start = Callable[[Order, int], int]
    """Starts the leader with its output going to a descriptor. Returns its pid, or 0 in the leader itself."""

_ORDINARY_SIGNALS = [number for number in range(1, 32) if number not in (signal.SIGKILL, signal.SIGSTOP)]
_SIGNALS_FROM_OUTSIDE = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

WARM_CONTROL_FD = 3
"""The descriptor of a warm parent's control socket."""


def ignore_signals() -> None:
    """Ignore what terminals and supervisors send: the engine decides."""
    for number in _SIGNALS_FROM_OUTSIDE:
        signal.signal(number, signal.SIG_IGN)


def run_keeper(control: socket.socket, order: Order, start: Start) -> None:
    """Be the keeper of the process that `order` describes; called right after a fork.

    Returns only in a leader that `start` forked: everything else of the keeper ends in here.

    Args:
      control: sequenced-packet socket to the warden, one JSON message a packet; its end means that the warden is gone.
    """
    is_leader = False
    try:
        close_inherited(control.fileno())
        keeper = Keeper(control, order["id"])
        try:
            is_leader = keeper.start(order, start)
            if not is_leader:
                keeper.keep()
        finally:
            if not is_leader:
                keeper.kill()  # after a bug as well: the warden may be gone
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        if not is_leader:
            os._exit(0)  # never back into the loop that forked it


def close_inherited(*kept: int) -> None:
    """Close all descriptors but 0 to 2: a copy of another keeper's socket would hide the warden's end from it."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            os.closerange(fd, fd + 1)  # unlike close, silent about the descriptor that listed the directory


class Keeper:
    """The loop of one keeper."""

    def __init__(self, control: socket.socket, ident: int) -> None:
        self._control = control
        self._id = ident
        self._alarm = open_child_alarm()
        self._reaper = Reaper()
        self._log: BoundedLog | None = None
        self._has_told_exit = False

    def start(self, order: Order, start: Start) -> bool:
        """Start the process and tell of it; True in the process itself, if `start` forked it."""
        become_subreaper("relax-keeper")
        try:
            self._reaper.leader = self._start(order, start)
        except (OSError, ValueError) as exc:
            self._report(failure(self._id, exc))
            return False
        if self._reaper.leader == 0:
            self._control.close()
            return True
        self._report({"event": "spawned", "id": self._id, "pid": self._reaper.leader})
        return False

    def _start(self, order: Order, start: Start) -> int:
        os.chdir(order["cwd"])
        try:
            if "log_bytes" not in order:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                output = os.open(order["log"], flags, 0o600)
                try:
                    return start(order, output)
                finally:
                    os.close(output)
            self._log = BoundedLog(order["log"], order["log_bytes"])
            try:
                return start(order, self._log.writing)
            finally:
                self._log.hand_over()
        finally:
            os.chdir("/")

    def keep(self) -> None:
        """Serve until the tree is ended; at once when it was not started."""
        if self._reaper.leader is None:
            return
        grace_s = self._wait_end_order()
        started = time.monotonic()
        if grace_s > 0:
            self._wait_gone(grace_s)
        survivors = self.kill()
        if self._log is not None:
            self._log.close()
        seconds = time.monotonic() - started
        self._report({"event": "ended", "id": self._id, "survivors": survivors, "seconds": seconds})

    def _wait_end_order(self) -> float:
        """Tell of the leader's exit; returns the grace, in seconds, once the tree shall end (0: the warden is gone)."""
        while True:
            ready = self._wait(None)
            if self._control.fileno() in ready:
                return self._take_order()
            if self._alarm in ready:
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
        hurry_up()
        survivors = self._reaper.kill_all(self._alarm)
        self._tell_exit()
        if survivors == 0:
            self._reaper.reap_leader()
            survivors = self._reaper.kill_all(self._alarm)
        return survivors

    def _wait(self, timeout_s: float | None) -> list[int]:
        """Wait for a child's death, output or the warden; returns the descriptors that are ready."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._alarm, select.POLLIN)
        if self._log is not None and self._log.reading >= 0:
            poll.register(self._log.reading, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]
        if self._alarm in ready:
            drain(self._alarm)
        if self._log is not None and self._log.reading in ready:
            self._log.pump()
        return ready

    def _reap(self) -> list[int]:
        living = self._reaper.reap()
        self._tell_exit()
        return living

    def _tell_exit(self) -> None:
        """Report the leader's exit once; what it wrote is in the log by then."""
        if self._reaper.leader_exit is not None and not self._has_told_exit:
            self._has_told_exit = True
            if self._log is not None:
                self._log.drain()
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


def spawn_leader(order: Order, output: int) -> int:
    """Start the program in a new session, without descriptors but 0, 1 and 2, with default signal actions.

    Returns:
      Its pid.

    Raises:
      OSError: with the file name it failed on.
    """
    argv = order["argv"]
    return os.posix_spawnp(
        argv[0],
        argv,
        order["env"],
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output, 2),
        ],
        setsid=True,
        setsigmask=(),
        setsigdef=_ORDINARY_SIGNALS,
    )


def exec_warm_parent(control: socket.socket, order: Order, warden: int) -> NoReturn:
    """Become the program of a warm parent, which has no keeper; called right after a fork.

    Args:
      control: socket to the warden; the program's descriptor `WARM_CONTROL_FD`.
      warden: pid of the parent.
    """
    try:
        die_with_parent(warden)
        close_inherited(control.fileno())
        os.dup2(control.fileno(), WARM_CONTROL_FD)
        os.set_inheritable(WARM_CONTROL_FD, True)  # dup2 leaves it as it is when the number is the same
        os.setsid()
        os.chdir(order["cwd"])
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        take_standard_streams(log)
        for number in _ORDINARY_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execve(order["argv"][0], order["argv"], order["env"])
    except (OSError, ValueError) as exc:
        with socket.socket(fileno=WARM_CONTROL_FD) as to_warden:
            to_warden.send(json.dumps(failure(order["id"], exc)).encode())
    finally:
        os._exit(1)


def take_standard_streams(output: int) -> None:
    """Read from the null device and write to `output`."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(output, 1)
    os.dup2(output, 2)


def failure(ident: int, exc: OSError | ValueError) -> Report:
    """The report that nothing was started."""
    if isinstance(exc, OSError):
        number, what = exc.errno or errno.EIO, str(exc.filename or "")
    else:  # a NUL inside, or a name with "="
        number, what = errno.EINVAL, str(exc)
    return {"event": "failed", "id": ident, "errno": number, "what": what[:MAX_TEXT_LEN]}
