"""What the run is doing now: the tree of tasks as text, on demand and on SIGUSR1."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import trio

_TRIO_DIR = str(Path(trio.__file__).parent)
_PACKAGE_DIR = Path(__file__).parents[1]


def render_tree(task: trio.lowlevel.Task | None = None) -> str:
    """The tree of tasks below `task` (default: all of the run), one line a task: its name and where it waits.

    Children are sorted by name, so that two dumps can be compared. Plain; inside a Trio run only.
    """
    root = trio.lowlevel.current_root_task() if task is None else task
    return "" if root is None else "\n".join(_lines(root, ""))


async def dump_on_signal(
    tell: Callable[[str], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Tell the tree of tasks at every SIGUSR1; `started()` once the signal is received. Runs until cancelled."""
    with trio.open_signal_receiver(signal.SIGUSR1) as received:
        task_status.started()
        async for _ in received:
            tell(render_tree())


def _lines(task: trio.lowlevel.Task, indent: str) -> Iterator[str]:
    yield f"{indent}{task.name}  {_where(task)}"
    children = [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    for child in sorted(children, key=lambda child: child.name):
        yield from _lines(child, indent + "    ")


def _where(task: trio.lowlevel.Task) -> str:
    """The innermost frame that is not Trio's own: what the task waits for."""
    place = "running"
    for frame, line in task.iter_await_frames():
        name = frame.f_code.co_filename
        if not name.startswith(_TRIO_DIR):
            path = Path(name)
            shown = path.relative_to(_PACKAGE_DIR) if path.is_relative_to(_PACKAGE_DIR) else path.name
            place = f"{shown}:{line} {frame.f_code.co_name}"
    return place
