"""The pause of a run's attempts between two steps: begun at a close, ended before the next opening, or by whatever ends
the block that owns it, so that no engine stays paused behind a run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from attrs import define

from relax_trio.backend.base import Backend, Pausing
from relax_trio.events import emit
from relax_trio.sync.cleanup import cleanup_scope

END_S = 10.0
"""Bound of letting attempts go on when the block is left."""


@define(eq=False)
class Pause:
    """A pause that may be on.

    Args:
      backend: can pause where `begin` is called.
    """

    _backend: Backend
    _since_s: float = 0.0
    _on: Pausing | None = None

    @property
    def is_on(self) -> bool:
        """Whether attempts are paused, or on their way there."""
        return self._on is not None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Own the pause for the length of the block; one that is on when it is left ends.

        Cancellation: the end of the pause is shielded and bounded.
        """
        try:
            yield
        finally:
            if self.is_on:
                with cleanup_scope(END_S, "the pause of the attempts"):
                    await self.end()

    async def begin(self) -> None:
        """Pause every attempt where it is; nothing happens while they are.

        Cancellation: it counts as on.
        """
        if self._on is None:
            self._on, self._since_s = self._backend.pausing, trio.current_time()
            assert self._on is not None, "a run is refused at its start where attempts can't be paused"
            await self._on.pause()
            emit("attempts.paused", attempts=self._backend.load().n_running)

    async def end(self) -> None:
        """Let attempts go on; nothing happens while none is paused.

        Cancellation: it stays on, and ends when the block is left.
        """
        if self._on is not None:
            await self._on.resume()
            self._on = None
            emit("attempts.resumed", seconds=trio.current_time() - self._since_s)
