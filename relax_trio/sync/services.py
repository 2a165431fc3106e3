"""Services: children that outlive the work which cleans up through them, and are stopped in reverse order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio
from attrs import define, field

from relax_trio.sync.cleanup import cleanup_scope

T = TypeVar("T")


@define(eq=False)
class _Service:
    name: str
    stop_s: float
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    ended: trio.Event = field(factory=trio.Event)


class Services:
    """Starts services inside the `open` block that made it."""

    _nursery: trio.Nursery

    def __init__(self) -> None:
        self._running: list[_Service] = []

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[Services]:
        """Own services for the length of the block; on leaving, stop them one by one, last started first."""
        services = cls()
        async with trio.open_nursery() as services._nursery:
            try:
                yield services
            finally:
                await services._stop()

    async def start(self, run: Callable[..., Awaitable[object]], *, name: str, stop_s: float = 10.0) -> Any:
        """Start `run(task_status=…)` and return what it gave to `started()`.

        Until then errors come out bare and cancelling the caller cancels the service. After it, the service is shielded
        from the cancellation of the block around it: it ends when the block is left, by its own return or by an error,
        which cancels the block.

        Args:
          run: the service; its clean-up may take `stop_s` seconds after it was cancelled.
          name: name of the task.
          stop_s: bound of its stop, in seconds.
        """
        service = _Service(name, stop_s)

        async def child(*, task_status: trio.TaskStatus[Any]) -> None:
            try:
                with service.scope:
                    await run(task_status=task_status)
            finally:
                service.ended.set()

        value = await self._nursery.start(child, name=name)
        service.scope.shield = True  # ended by `_stop`, which the block that owns it always reaches
        self._running.append(service)
        return value

    async def _stop(self) -> None:
        while self._running:
            service = self._running.pop()
            service.scope.shield = False
            service.scope.cancel(reason=f"stop service {service.name}")
            with cleanup_scope(service.stop_s, f"service {service.name}"):
                await service.ended.wait()
