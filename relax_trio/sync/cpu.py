"""Blocking work in worker threads, under limiters of its own kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, TypeVarTuple

import trio

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class CpuPool(Protocol):
    """Runs blocking functions off the event loop."""

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run `fn(*args)` and return what it returns.

        Cancellation: waits for the call to end (a thread can't be interrupted), then raises Cancelled.
        """
        ...


class ThreadCpuPool:
    """`CpuPool` over Trio's worker threads with an own limit, so that it can't starve process or file work."""

    def __init__(self, n_threads: int) -> None:
        self._limiter = trio.CapacityLimiter(n_threads)

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """See `CpuPool.run`."""
        return await trio.to_thread.run_sync(fn, *args, limiter=self._limiter)


class InlineCpuPool:
    """`CpuPool` for tests on the virtual clock: calls in place after a checkpoint."""

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """See `CpuPool.run`."""
        await trio.lowlevel.checkpoint()
        return fn(*args)
