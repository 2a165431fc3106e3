"""A fork of a warm parent becomes what `PYTHON FILE|-m MODULE ARGS` would be. Standard library only."""

from __future__ import annotations

import gc
import importlib.machinery
import os
import pkgutil
import random
import runpy
import signal
import sys
import types
from types import TracebackType

from relax_trio.warden.keeper import close_inherited, take_standard_streams
from relax_trio.warden.tree import set_process_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from relax_trio.warden.wire import Order

_OWN_DIRECTORY = os.path.dirname(__file__)


def fork_leader(order: Order, output: int) -> int:
    """Fork the process, in a session of its own and with its standard streams; returns its pid, and 0 in it."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        take_standard_streams(output)
    return pid


class Fresh:
    """What a Python has when it starts, noted before a module can change it; given back to every fork."""

    def __init__(self) -> None:
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._collects = gc.isenabled()
        with open("/proc/self/comm", "rb") as file:
            self._process_name = file.read().rstrip(b"\n")
        self._shell_set: dict[str, str] = {}
        self._shell_unset: list[str] = []

    def note_shell(self, given: dict[str, str]) -> None:
        """Note what the shell that started this Python did to the environment it was given."""
        self._shell_set = {name: value for name, value in os.environ.items() if given.get(name) != value}
        self._shell_unset = [name for name in given if name not in os.environ]

    def set_module_path(self, command: list[str]) -> None:
        """Put in front of `sys.path` what PYTHON would put there for this command."""
        if command[1] != "-m" and _is_importable(command[1]):
            sys.path.insert(0, os.path.join(os.getcwd(), command[1]))
        elif not getattr(sys.flags, "safe_path", False):
            in_front = os.getcwd() if command[1] == "-m" else os.path.dirname(os.path.realpath(command[1]))
            sys.path.insert(0, in_front)

    def restore_signals(self) -> None:
        """Undo what was done to signal actions, the mask and the wake-up descriptor."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            if handler is not None and handler != signal.getsignal(number):
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def restore(self, order: Order) -> None:
        """Make this process one that was just started for `order`."""
        self.restore_signals()
        close_inherited()
        os.umask(self._umask)
        os.chdir(order["cwd"])
        set_process_name(self._process_name)
        environment = {name: value for name, value in order["env"].items() if name not in self._shell_unset}
        os.environ.clear()
        os.environ.update(environment, **self._shell_set)
        random.seed()
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            numpy_random.seed()
        sys.argv = order["argv"][1:]
        if hasattr(sys, "orig_argv"):
            sys.orig_argv[1:] = sys.argv
        if self._collects:
            gc.enable()


def run_as_main(order: Order, fresh: Fresh) -> None:
    """Run the module or file of `order` as `__main__`; what it raises ends the interpreter as it always does."""
    fresh.restore(order)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"])
    try:
        if sys.argv[0] == "-m":
            module = sys.argv.pop(1)
            _run_module(module, alter_argv=True)
        elif _is_importable(os.path.join(os.getcwd(), sys.argv[0])):
            _run_module("__main__", alter_argv=False)
        else:
            _run_file(sys.argv[0], main)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as exc:
        _show(exc)
        sys.exit(1)


def _is_importable(path: str) -> bool:
    """Whether `path` is a directory or an archive, whose `__main__` is what PYTHON runs."""
    return pkgutil.get_importer(path) is not None


def _run_module(name: str, *, alter_argv: bool) -> None:
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]  # no public name; PYTHON -m calls it


def _run_file(path: str, main: types.ModuleType) -> None:
    file_name = os.path.join(os.getcwd(), path)
    try:
        with open(file_name, "rb") as file:
            code = pkgutil.read_code(file)  # None unless it is compiled already
            file.seek(0)
            source = file.read() if code is None else b""
    except OSError as exc:
        _refuse(f"{sys.executable}: can't open file {file_name!r}: [Errno {exc.errno}] {exc.strerror}")
    loader = importlib.machinery.SourceFileLoader("__main__", file_name)
    main.__dict__.update(__cached__=None, __file__=file_name, __loader__=loader)
    exec(code or compile(source, file_name, "exec", dont_inherit=True), main.__dict__)


def _refuse(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    sys.exit(2)


def _show(exc: BaseException) -> None:
    """Tell of an uncaught exception as Python does, without the frames of this package."""
    trace: TracebackType | None = exc.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN_DIRECTORY):
        trace = trace.tb_next
    exc.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(exc), exc, trace
    sys.excepthook(type(exc), exc, trace)
