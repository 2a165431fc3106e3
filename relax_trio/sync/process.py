"""Child processes as blocks: the engine's side of the warden.

`Warden.run` is a service; `Warden.process` owns one process tree for the length of an `async with` block, and
`Warden.warm_parent` a Python that forks such processes. The warden program (relax_trio/warden) does the spawning,
ending and reaping; nothing here signals or waits for a process but the warden itself.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import trio
from attrs import define, field, frozen

from relax_trio import warden as warden_program
from relax_trio.errors import EngineFault
from relax_trio.events import emit
from relax_trio.sync.cleanup import cleanup_scope
from relax_trio.warden.tree import KILL_WAIT_S
from relax_trio.warden.wire import Unpacker, pack

if TYPE_CHECKING:
    from relax_trio.warden.wire import Order, Report

_PROGRAM_DIR = os.path.dirname(os.path.abspath(warden_program.__file__))
_WARM_MAIN = os.path.join(_PROGRAM_DIR, "warm_main.py")

MAX_TERM_GRACE_S = 15.0
"""Longest grace between SIGTERM and SIGKILL that the bound of a clean-up leaves room for, in seconds."""

_ANSWER_S = 2.0
"""Time for the warden's answer on a loaded machine, beyond what it waits for itself."""

STOP_S = KILL_WAIT_S + _ANSWER_S
"""Bound of `Warden.run`'s stop, in seconds."""


@frozen
class ExitStatus:
    """How a process ended: by exit code or by signal, the other is None."""

    code: int | None = None
    signal: int | None = None

    @property
    def returncode(self) -> int:
        """The exit code, or the signal's number negated."""
        return self.code if self.code is not None else -(self.signal or 0)

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            return f"signal {self.signal} ({signal.Signals(self.signal).name})"
        except ValueError:
            return f"signal {self.signal}"


class PreloadRefused(Exception):
    """A warm parent could not import a module, or may not fork with it; the message names it and says why."""


KILLED = ExitStatus(signal=int(signal.SIGKILL))


@define(eq=False)
class Child:
    """A process tree owned by a `Warden.process` block.

    Attributes:
      name: public name, for events and errors.
      pid: of the leader; names no other process before the block is left.
      exit_status: how the leader ended, None while it runs.
      survivors: members of the tree that could not be killed; None before the block is left.
      end_s: how long ending the tree took, in seconds; None before, or when the warden was killed or hurried.
    """

    name: str
    pid: int = 0
    exit_status: ExitStatus | None = None
    survivors: int | None = None
    end_s: float | None = None
    _ident: int = 0
    _failure: OSError | PreloadRefused | None = None
    _is_orphaned: bool = False
    _settled: trio.Event = field(factory=trio.Event)
    _exited: trio.Event = field(factory=trio.Event)
    _ended: trio.Event = field(factory=trio.Event)

    async def wait_exit(self) -> ExitStatus:
        """Wait until the leader ended; any number of tasks may.

        Raises:
          EngineFault: the warden died, so that nobody knows.

        Cancellation: safe; the process goes on.
        """
        await self._exited.wait()
        if self.exit_status is None:
            raise EngineFault(f"process {self.name}: the warden died, and with it every process it owned")
        return self.exit_status

    async def _wait_started(self) -> None:
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure
        if self._is_orphaned:
            raise EngineFault(f"process {self.name}: the warden died before it was started")

    def _take(self, report: Report) -> None:
        """Change with what the warden reports."""
        event = report["event"]
        if event == "spawned":
            self.pid = report["pid"]
        elif event == "failed":
            number = report["errno"]
            self._failure = OSError(number, report.get("why") or os.strerror(number), report["what"] or None)
            self._end(survivors=0)
        elif event == "refused":
            self._failure = PreloadRefused(report["why"])
            self._end(survivors=0)
        elif event == "exited":
            self.exit_status = ExitStatus(report.get("code"), report.get("signal"))
            self._exited.set()
        elif event == "ended":
            self.end_s = report["seconds"]
            self._end(survivors=report["survivors"], exit_status=KILLED)
        self._settled.set()

    def _end(self, *, survivors: int, exit_status: ExitStatus | None = None) -> None:
        self.survivors = survivors
        self.exit_status = self.exit_status or exit_status
        self._settled.set()
        self._exited.set()
        self._ended.set()

    def _orphan(self) -> None:
        """The warden died: the keeper kills the tree, but nobody tells of it."""
        self._is_orphaned = True
        self._settled.set()
        self._exited.set()
        self._ended.set()


class Warden:
    """The service that owns every child process of the engine."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}
        self._n_spawned = 0
        self._is_closing = False
        self._has_died = False
        self._is_gone = False
        self._orders_in: trio.MemorySendChannel[Order] | None = None
        self._stream: trio.SocketStream | None = None
        self.pid = 0

    @property
    def n_processes(self) -> int:
        """Process blocks that are open."""
        return len(self._children)

    async def run(self, *, task_status: trio.TaskStatus[Warden] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the warden program until this is cancelled; `started(self)` is called once it is ready.

        Raises:
          OSError: the program could not be started.
          EngineFault: it died. Every process it owned dies with it, every waiter gets an EngineFault too.

        Cancellation: the program is told to end, kills what is left and is reaped; bounded.
        """
        program, stream = await _start_program()
        self.pid = program.pid
        self._stream = stream
        # Unbounded: orders are posted from plain functions, a few for each open block.
        orders_out: trio.MemoryReceiveChannel[Order]
        self._orders_in, orders_out = trio.open_memory_channel(math.inf)
        unpacker = Unpacker()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_send_orders, orders_out, stream, name="warden orders")
                await self._hear(stream, unpacker, task_status)
                self._has_died = not self._is_closing
                nursery.cancel_scope.cancel(reason="the warden's stream ended")
        finally:
            self.hurry()
            with cleanup_scope(STOP_S, "warden"):
                await self._hear(stream, unpacker, trio.TASK_STATUS_IGNORED)
                await program.wait()
            self._settle_all(orphaned=self._has_died)
            stream.socket.close()
        if self._has_died:
            raise EngineFault(f"the warden (pid {self.pid}) died, status {program.returncode}; its processes die too")

    @asynccontextmanager
    async def process(
        self,
        *,
        argv: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        log_path: Path,
        name: str,
        term_grace_s: float = 5.0,
        log_bytes: int | None = None,
        warm_parent: Child | None = None,
    ) -> AsyncIterator[Child]:
        """Own one process tree for the length of the block.

        The process runs in a session of its own, reads from the null device, appends stdout and stderr to `log_path`
        and inherits no other descriptor. Leaving the block, for whatever reason, ends its tree: SIGTERM to every
        member, `term_grace_s` seconds, SIGKILL, until none is left. That is shielded and bounded.

        Args:
          argv: program and arguments; no secrets, they show in process lists. A bare name is searched in PATH.
          cwd: its working directory.
          env: its whole environment.
          log_path: created with mode 0600 when missing.
          name: public name.
          term_grace_s: 0 (kill at once) to `MAX_TERM_GRACE_S`.
          log_bytes: most bytes of the log, start and end kept; the process then writes into a pipe. None: no limit.
          warm_parent: a block that is open: its fork becomes the process, `argv` being PYTHON FILE or PYTHON -m MODULE.

        Raises (on entering):
          OSError: it could not be started; `filename` says what failed. The warm parent's death is one (ESRCH).
          EngineFault: the warden is dead.
        """
        if not 0 <= term_grace_s <= MAX_TERM_GRACE_S:
            raise ValueError(f"process {name}: the grace is 0 to {MAX_TERM_GRACE_S:g} s, not {term_grace_s:g}")
        child = self._register(name)
        order = _order("spawn", child, argv, cwd, env, log_path)
        if log_bytes is not None:
            order["log_bytes"] = log_bytes
        if warm_parent is not None:
            order["warm"] = warm_parent._ident
        async with self._owned(child, order, term_grace_s):
            yield child

    @asynccontextmanager
    async def warm_parent(
        self,
        *,
        command: Sequence[str],
        modules: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        log_path: Path,
        name: str,
        is_login_shell: bool = False,
    ) -> AsyncIterator[Child]:
        """Own a Python that has `modules` imported and forks processes (see `process`) for the length of the block.

        It is started through bash, as a command would be, so that its forks get what a shell adds to the environment.
        The block is entered once the modules are imported; leaving it kills the warm parent and nothing it forked.

        Args:
          command: PYTHON FILE|-m MODULE ARGS of the processes: that Python is started, and looks for modules where it
            would for this command.
          env: its environment.
          log_path: what modules print when they are imported.

        Raises (on entering):
          PreloadRefused: a module cannot be imported or starts threads.
          OSError: it could not be started, or ended before it was ready (ESRCH).
          EngineFault: the warden is dead.
        """
        child = self._register(name)
        line = shlex.join([command[0], _WARM_MAIN, *command[1:]])
        argv = ["/bin/bash", "-lc" if is_login_shell else "-c", line]
        order = _order("warm", child, argv, cwd, env, log_path)
        order["command"], order["modules"] = list(command), list(modules)
        async with self._owned(child, order, 0.0):
            yield child

    def hurry(self) -> None:
        """Kill every process at once and for good: nothing can be started any more. Never blocks; idempotent.

        Blocks that are open see their process end by SIGKILL; leaving them takes as long as the kill does.
        """
        self._is_closing = True
        if self._stream is not None and not self._is_gone:
            try:
                self._stream.socket.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the warden is gone already

    async def wait_empty(self) -> None:
        """Wait until none of the processes that exist now is left. Cancellation: safe."""
        await trio.lowlevel.checkpoint()
        for child in list(self._children.values()):
            await child._ended.wait()

    # --- inside -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _owned(self, child: Child, order: Order, grace_s: float) -> AsyncIterator[None]:
        """Start the child, and end it when the block is left."""
        self._post(order)
        try:
            await child._wait_started()
            yield
        finally:
            if not child._ended.is_set():
                self._post({"op": "end", "id": child._ident, "grace_s": grace_s})
            with cleanup_scope(grace_s + KILL_WAIT_S + _ANSWER_S, f"process {child.name}"):
                await child._ended.wait()
            del self._children[child._ident]
            if child.survivors:
                emit("process.unkillable", process=child.name, pid=child.pid, survivors=child.survivors)

    def _register(self, name: str) -> Child:
        if self._has_died or self._orders_in is None:
            raise EngineFault(f"process {name}: the warden does not run")
        if self._is_closing:
            raise OSError(errno.ECANCELED, "the warden is closing: nothing can be started", name)
        self._n_spawned += 1
        child = self._children[self._n_spawned] = Child(name, ident=self._n_spawned)
        return child

    def _post(self, order: Order) -> None:
        assert self._orders_in is not None, "only a running warden has children"
        try:
            self._orders_in.send_nowait(order)
        except trio.BrokenResourceError:
            pass  # the warden is gone, which settles every child

    async def _hear(self, stream: trio.SocketStream, unpacker: Unpacker, task_status: trio.TaskStatus[Warden]) -> None:
        """Take reports until the stream ends."""
        try:
            async for data in stream:
                for body in unpacker.feed(bytes(data)):
                    report: Report = json.loads(body)
                    if report["event"] == "ready":
                        task_status.started(self)
                    elif (child := self._children.get(report["id"])) is not None:
                        child._take(report)
        except trio.BrokenResourceError:
            pass  # it was killed with orders unread: the same as an end

    def _settle_all(self, *, orphaned: bool) -> None:
        self._is_gone = True
        for child in self._children.values():
            if child._ended.is_set():
                continue
            if orphaned:
                child._orphan()
            else:
                child._end(survivors=0, exit_status=KILLED)


async def _send_orders(orders: trio.MemoryReceiveChannel[Order], stream: trio.SocketStream) -> None:
    """Write orders one after another, so that none is ever cut in two."""
    try:
        async with orders:
            async for order in orders:
                await stream.send_all(pack(order))
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # the warden is gone or hurried; the reader notices


def _order(
    op: Literal["spawn", "warm"], child: Child, argv: Sequence[str], cwd: Path, env: Mapping[str, str], log_path: Path
) -> Order:
    """The order to start a process; the warden has another working directory, so paths are made absolute."""
    return {
        "op": op,
        "id": child._ident,
        "argv": list(argv),
        "cwd": os.path.abspath(cwd),
        "env": dict(env),
        "log": os.path.abspath(log_path),
    }


async def _start_program() -> tuple[trio.Process, trio.SocketStream]:
    """Start the warden program; returns it and our end of the stream."""
    with ExitStack() as on_error:
        ours, theirs = socket.socketpair()
        on_error.enter_context(ours)
        with theirs:
            program = await trio.lowlevel.open_process(
                _command(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the engine, which then decides
                cwd="/",
            )
        on_error.pop_all()
    return program, trio.SocketStream(trio.socket.from_stdlib_socket(ours))


def _command(fd: int) -> list[str]:
    """How to start the warden: isolated, without site-packages, with this process's encoding of file names."""
    main = os.path.join(_PROGRAM_DIR, "__main__.py")
    return [sys.executable, "-I", "-S", "-X", f"utf8={sys.flags.utf8_mode}", main, str(fd), str(os.getpid())]
