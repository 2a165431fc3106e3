"""Blocking work in worker threads, under limiters of its own kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, TypeVarTuple, cast

import trio
from attrs import define

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class CpuPool(Protocol):
    """Runs blocking functions off the event loop."""

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run `fn(*args)` and return what it returns.

        Cancellation: waits for the call to end (a thread can't be interrupted), then raises Cancelled.
        """
        ...

    async def run_within(self, limit_s: float, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a foreign `fn(*args)` that may hang; its time counts from the moment it has a thread.

        Raises:
          trio.TooSlowError: `limit_s` seconds are over. The thread goes on unseen, keeps its place in the pool until
            it ends, and what it returns is dropped.

        Cancellation: leaves the thread behind in the same way and raises Cancelled at once.
        """
        ...


class ThreadCpuPool:
    """`CpuPool` over Trio's worker threads with an own limit, so that it can't starve process or file work."""

    def __init__(self, n_threads: int) -> None:
        self._limiter = trio.CapacityLimiter(n_threads)

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """See `CpuPool.run`."""
        return await trio.to_thread.run_sync(fn, *args, limiter=self._limiter)

    async def run_within(self, limit_s: float, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """See `CpuPool.run_within`."""
        with trio.CancelScope() as scope:
            # Trio takes any object with these two methods as a limiter.
            limiter = cast("trio.CapacityLimiter", _TimedLimiter(self._limiter, scope, limit_s))
            return await trio.to_thread.run_sync(fn, *args, abandon_on_cancel=True, limiter=limiter)
        raise trio.TooSlowError


@define(eq=False)
class _TimedLimiter:
    """A limiter that starts the clock of `scope` when it lets its borrower in."""

    _inner: trio.CapacityLimiter
    _scope: trio.CancelScope
    _limit_s: float

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        await self._inner.acquire_on_behalf_of(borrower)
        self._scope.deadline = trio.current_time() + self._limit_s

    def release_on_behalf_of(self, borrower: object) -> None:
        self._inner.release_on_behalf_of(borrower)


class InlineCpuPool:
    """`CpuPool` for tests on the virtual clock: calls in place after a checkpoint."""

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """See `CpuPool.run`."""
        await trio.lowlevel.checkpoint()
        return fn(*args)

    async def run_within(self, limit_s: float, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """See `CpuPool.run_within`; a call in place takes no virtual time, so it is never too slow."""
        return await self.run(fn, *args)
