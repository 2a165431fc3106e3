"""How a run is stopped by a signal: gracefully by the first, at once by the second."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import trio
from attrs import define, field

from relax_trio.events import emit

HURRIED_EXIT_S = 10.0
"""How long the second signal waits for the warden's word that every process is gone."""


class Killer(Protocol):
    """Who ends every child process at once: the warden's client."""

    def hurry(self) -> None:
        """SIGKILL every process; nothing can be started any more. Plain."""
        ...

    async def wait_empty(self) -> None:
        """Wait until no process is left. Cancellation: safe."""
        ...


@define(eq=False)
class Stop:
    """The scopes of a run and the signal that ended it.

    The first SIGINT, SIGTERM or SIGHUP cancels the work; what stands behind it (the last checkpoint, the services' own
    end) goes on. Before the work has begun it cancels the whole run. The second signal kills every process and exits.

    Attributes:
      stopped_by: the first signal, None while none came.
      killer: set while there are processes to kill.
      temp_root: what a hurried exit has to remove, because no block is left in order.
    """

    stopped_by: signal.Signals | None = None
    killer: Killer | None = None
    temp_root: Path | None = None
    _run_scope: trio.CancelScope = field(factory=trio.CancelScope)
    _work_scope: trio.CancelScope = field(factory=trio.CancelScope)
    _has_begun: bool = False

    @contextmanager
    def run(self) -> Iterator[None]:
        """Scope of everything, starting up included."""
        with self._run_scope:
            yield

    @contextmanager
    def work(self) -> Iterator[None]:
        """Scope of the work, inside `run`; once, because a run works once."""
        self._has_begun = True
        with self._work_scope:
            yield

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Receive signals until cancelled; `started()` once they are received."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as received:
            task_status.started()
            async for number in received:
                if self.stopped_by is None:
                    self._stop(signal.Signals(number))
                else:
                    await self._hurry(signal.Signals(number))

    def _stop(self, by: signal.Signals) -> None:
        self.stopped_by = by
        emit("run.stopping", signal=by.name, hint="a second one kills what is left and exits at once")
        self._work_scope.cancel(reason=by.name)
        if not self._has_begun:
            self._run_scope.cancel(reason=by.name)

    async def _hurry(self, by: signal.Signals) -> None:
        """Exit as soon as no process is left; blocking work in threads is not waited for."""
        emit("run.hurried", signal=by.name)
        if self.killer is not None:
            with trio.move_on_after(HURRIED_EXIT_S):
                self.killer.hurry()
                await self.killer.wait_empty()
        if self.temp_root is not None:
            shutil.rmtree(self.temp_root, ignore_errors=True)
        os._exit(128 + by)
