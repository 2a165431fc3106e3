"""The processes below this one: finding, signalling and reaping them until none is left. Standard library only.

The caller is a child subreaper: whatever session or group a descendant puts itself into and whoever its parent was, it
becomes a direct child here once its ancestors are gone. So "no descendant is left" is the same as "no living direct
child is left", and a SIGCHLD announces every step towards it.

Signals go to pids read from /proc a moment before. That is safe without pidfds: the kernel gives pids out in cyclic
order, so one seen alive just now cannot name a stranger before the whole range was used up.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

KILL_WAIT_S = 10.0
"""How long killed processes may take to vanish (one in uninterruptible sleep may never), in seconds."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper(name: str) -> None:
    """Adopt every orphan among this process's descendants; show as `name` (at most 15 bytes) in process lists.

    Raises:
      OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    set_process_name(name.encode())


def set_process_name(name: bytes) -> None:
    """Show as `name` (at most 15 bytes) in process lists."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name), 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Be killed when `parent`, this process's single-threaded parent, ends; an exec keeps that, a fork does not."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def open_child_alarm() -> int:
    """Return a descriptor that becomes readable with every SIGCHLD from now on; read it with `drain`."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading


def drain(alarm: int) -> None:
    """Make `alarm` unreadable again."""
    try:
        while len(os.read(alarm, 4096)) == 4096:
            pass
    except BlockingIOError:
        pass


def children_of(pid: int) -> list[int]:
    """Pids of the direct children of `pid`, zombies included; empty when it is gone.

    Exact for the calling process; for others a child that appears or goes meanwhile may be missed.
    """
    if not _HAS_CHILDREN_FILES:
        return _children_by_scan(pid)
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found.extend(map(int, file.read().split()))
        except (FileNotFoundError, ProcessLookupError):
            continue  # this thread ended; its children are another's now
    return found


def _children_by_scan(parent: int) -> list[int]:
    """`children_of` for kernels without the children files: reads the status of every process."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    after_name = file.read().rpartition(b") ")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(after_name[1]) == parent:
                found.append(int(entry))
    return found


_HAS_CHILDREN_FILES = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def descendants() -> list[int]:
    """Pids below this process, parents before their children."""
    found = children_of(os.getpid())
    for pid in found:  # grows while it is walked
        found.extend(children_of(pid))
    return found


def terminate_descendants() -> None:
    """Ask every descendant to end; wake the stopped ones so that they can."""
    for pid in descendants():
        send(pid, signal.SIGTERM)
        send(pid, signal.SIGCONT)


def kill_descendants(spare: Collection[int] = ()) -> None:
    """Send SIGKILL to every descendant but the direct children in `spare` and what is below them.

    A parent is killed before its children are listed: from then on it makes no new ones. Its whole group is killed with
    it, in one call of the kernel that no fork slips through: a storm of forks is over before it can be listed. Nobody
    outside the tree is in such a group, because its session was made in the tree; but for the groups of this process
    and of those spared.
    """
    groups = {os.getpgrp(), *filter(None, map(_group_of, spare))}
    doomed = [pid for pid in children_of(os.getpid()) if pid not in spare]
    for pid in doomed:  # grows while it is walked
        group = _group_of(pid)
        if group is not None and group not in groups:
            groups.add(group)
            _send_group(group, signal.SIGKILL)
        send(pid, signal.SIGKILL)
        doomed.extend(children_of(pid))


def hurry_up() -> None:
    """Run before all ordinary processes from now on, where that is permitted: a storm of them leaves no time else."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        pass


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _send_group(group: int, signum: int) -> None:
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        pass  # all gone, or some belong to another user: as in `send`


def send(pid: int, signum: int) -> None:
    """Send a signal; a process that is gone, or that belongs to another user, is let be."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass  # one that cannot be signalled stays among the living and is counted as a survivor


class Reaper:
    """Collects dead direct children, but leaves the zombie of one leader where it is.

    Attributes:
      leader: its pid, or None.
      leader_exit: how it ended: ("code" or "signal", number); None while it lives.
    """

    def __init__(self, leader: int | None = None) -> None:
        self.leader = leader
        self.leader_exit: tuple[str, int] | None = None

    def reap(self) -> list[int]:
        """Collect what is dead; returns the living direct children, the leader among them while it lives."""
        living = []
        for pid in children_of(os.getpid()):
            if pid == self.leader:
                if not self._has_leader_exited():
                    living.append(pid)
            elif os.waitpid(pid, os.WNOHANG)[0] == 0:
                living.append(pid)
        return living

    def reap_leader(self) -> None:
        """Collect the leader's zombie: its pid is free again."""
        if self.leader is not None and self.leader_exit is not None:
            os.waitpid(self.leader, 0)
            self.leader = None

    def kill_all(self, alarm: int) -> int:
        """Kill every descendant and wait until none is left but the leader's zombie, at most `KILL_WAIT_S`.

        Returns:
          How many direct children could not be killed.
        """
        deadline = time.monotonic() + KILL_WAIT_S
        poll = select.poll()
        poll.register(alarm, select.POLLIN)
        while self.reap():
            kill_descendants()
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return len(self.reap())
            drain(alarm)
        return 0

    def _has_leader_exited(self) -> bool:
        assert self.leader is not None, "only called for a leader"
        if self.leader_exit is None:
            result = os.waitid(os.P_PID, self.leader, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if result is None:
                return False
            self.leader_exit = ("code" if result.si_code == os.CLD_EXITED else "signal", result.si_status)
        return True
