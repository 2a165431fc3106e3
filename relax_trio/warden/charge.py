"""What the warden knows of the processes it forked or was handed. Values only; program.py changes them."""

from __future__ import annotations

import os
import signal
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from relax_trio.warden.wire import Order, Report


PARENT_ENDED = "its warm parent ended before it was forked"


class Keeper:
    """What the warden knows of a keeper.

    Attributes:
      ident: id of the process that it keeps.
      control: the warden's end of its socket.
      pid: 0 while a warm parent has not told which fork it is.
      parent: the warm parent that forks it, if one does.
      has_spawned, has_exited, is_done: it told of its leader's start, of its exit, and its last word.
      status: wait status, once it was collected.
    """

    def __init__(self, ident: int, control: socket.socket, parent: WarmParent | None = None) -> None:
        self.ident = ident
        self.control = control
        self.parent = parent
        self.pid = 0
        self.has_spawned = False
        self.has_exited = False
        self.is_done = False
        self.status: int | None = None

    def is_expected(self) -> bool:
        """Whether its warm parent may still tell of it."""
        return self.parent is not None and self.pid == 0 and not self.parent.is_done

    def how_ended(self) -> Report:
        """How its process ended when it was killed itself."""
        return {"signal": int(signal.SIGKILL)}

    def why_stillborn(self) -> str:
        """Why its process was not started."""
        return PARENT_ENDED if self.pid == 0 else "its keeper was killed before it was started"


class WarmParent(Keeper):
    """What the warden knows of a warm parent, which has no keeper.

    Attributes:
      waiting: orders it did not get yet, each with the other end of its keeper's control socket.
      is_busy: it imports its modules or forks.
    """

    def __init__(self, ident: int, control: socket.socket) -> None:
        super().__init__(ident, control)
        self.waiting: deque[tuple[Order, socket.socket]] = deque()
        self.is_busy = True

    def how_ended(self) -> Report:
        """How it ended itself; by a shell's word where the shell that started it stayed."""
        if self.status is not None and os.WIFEXITED(self.status):
            return {"code": os.WEXITSTATUS(self.status)}
        return {"signal": os.WTERMSIG(self.status) if self.status is not None else int(signal.SIGKILL)}

    def why_stillborn(self) -> str:
        """Why it never was ready."""
        how = self.how_ended()
        what = f"exit code {how['code']}" if "code" in how else f"signal {how['signal']}"
        return f"the warm parent ended with {what} before it was ready"

    def withdraw(self, ident: int) -> bool:
        """Forget the waiting order `ident`; False when it was sent already."""
        for entry in self.waiting:
            if entry[0]["id"] == ident:
                self.waiting.remove(entry)
                entry[1].close()
                return True
        return False
