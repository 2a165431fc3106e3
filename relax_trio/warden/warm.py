"""The warm parent: a Python of the agent's own that has modules imported and forks itself for each process.

The fork that becomes the process needs a keeper above it, and the keeper must be the warden's child. So the warm parent
forks a go-between, which forks the keeper and goes: its child falls to the warden, the next subreaper above. The keeper
forks the process. From there on all is as with a keeper that the warden forked itself.

Standard library only, for any Python from 3.9 on. Being killed is its end; it also goes with the warden.
"""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import select
import socket
import sys
import threading
import traceback

from relax_trio.warden.fork import Fresh, fork_leader
from relax_trio.warden.keeper import WARM_CONTROL_FD, failure, ignore_signals, run_keeper
from relax_trio.warden.wire import MAX_PACKET_BYTES, MAX_TEXT_LEN, receive_order

TYPE_CHECKING = False
if TYPE_CHECKING:
    from relax_trio.warden.wire import Order, Report

_THREADS_END_S = 0.5
"""How long threads that a module joined may take to vanish, in seconds."""


def serve() -> tuple[Order, Fresh]:
    """Import the modules, then fork for every order. Returns in the forked process: its order, what to restore."""
    fresh = Fresh()
    os.set_inheritable(WARM_CONTROL_FD, False)
    control = socket.socket(fileno=WARM_CONTROL_FD)
    received = receive_order(control)
    if received is None:
        os._exit(0)
    order, _ = received
    fresh.note_shell(order["env"])
    fresh.set_module_path(order["command"])
    refusal = _preload(order["modules"])
    _flush()
    if refusal is not None:
        _send(control, {"event": "refused", "id": order["id"], "why": refusal[:MAX_TEXT_LEN]})
        os._exit(1)
    fresh.restore_signals()
    ignore_signals()
    gc.collect()
    gc.disable()
    gc.freeze()  # forks share these pages
    _send(control, {"event": "spawned", "id": order["id"], "pid": os.getpid()})
    while True:
        received = receive_order(control)
        if received is None:
            os._exit(0)
        order, (keeper_control,) = received
        if _fork_keeper(control, order, socket.socket(fileno=keeper_control)):
            return order, fresh


def _preload(modules: list[str]) -> str | None:
    """Import the modules in order; returns which one cannot be used, and why."""
    for name in modules:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as exc:  # a module may raise anything
            traceback.print_exc()
            return f"{name} cannot be imported: {type(exc).__name__}: {exc}"
        if (threads := _threads()) is not None:
            return (
                f"{name} starts threads ({threads}), and a fork has none of them: leave it out, or keep it from that "
                "(libraries for arithmetic by OPENBLAS_NUM_THREADS=1, OMP_NUM_THREADS=1, … in --agent-env)"
            )
    return None


def _threads() -> str | None:
    """Which threads there are besides this one; None when there are none."""
    for _ in range(round(_THREADS_END_S * 100)):
        if (n_threads := len(os.listdir("/proc/self/task"))) == 1:
            return None
        if threading.active_count() > 1:
            return ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        select.select([], [], [], 0.01)
    return f"{n_threads - 1} that Python does not know"


def _flush() -> None:
    """A fork would write what is in the buffers again."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _fork_keeper(control: socket.socket, order: Order, keeper_control: socket.socket) -> bool:
    """Fork a keeper and its process and see that the warden takes it; True in the process."""
    with keeper_control:
        try:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                go_between = os.fork()
                if go_between == 0:
                    control.close()
                    ours.close()
                    return _be_go_between(theirs, order, keeper_control)
                theirs.close()
                _hand_over(control, order, int(ours.recv(16) or -errno.ECHILD))
            os.waitpid(go_between, 0)  # its leave was the end of `ours`
        except OSError as exc:
            _send(control, failure(order["id"], exc))
    return False


def _hand_over(control: socket.socket, order: Order, keeper: int) -> None:
    """Tell the warden of the keeper (negative: an error number), and wait until it knows it."""
    if keeper < 0:
        raise OSError(-keeper, os.strerror(-keeper), "fork")
    _send(control, {"event": "forked", "id": order["id"], "pid": keeper})
    try:
        answer = control.recv(MAX_PACKET_BYTES)
    except ConnectionResetError:
        answer = b""
    if not answer:
        os._exit(0)  # the warden is gone


def _be_go_between(theirs: socket.socket, order: Order, keeper_control: socket.socket) -> bool:
    """Fork the keeper, tell its pid, and be its parent until told to leave. Returns in the process alone, with True."""
    is_leader = False
    go_between = os.getpid()
    try:
        try:
            keeper = os.fork()
        except OSError as exc:
            keeper = -(exc.errno or errno.EAGAIN)
        if keeper == 0:
            theirs.close()
            os.setsid()
            _wait_end(go_between)
            run_keeper(keeper_control, order, fork_leader)
            is_leader = True
        else:
            theirs.send(str(keeper).encode())
            theirs.recv(1)
    finally:
        if not is_leader:
            os._exit(0)
    return True


def _wait_end(go_between: int) -> None:
    """Wait until this process is the warden's child: who else would hear that its agent stopped it?"""
    try:
        end = os.pidfd_open(go_between)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(end, select.POLLIN)
    poll.poll()
    os.close(end)


def _send(control: socket.socket, report: Report) -> None:
    try:
        control.send(json.dumps(report).encode())
    except OSError:
        os._exit(0)  # the warden is gone
