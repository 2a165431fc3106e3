"""The first-request barrier: level-triggered presence of every place of a Group."""

from __future__ import annotations

from relax_trio.sync.gate import Gate


class PresenceBarrier:
    """Full while every one of `n_places` has at least one live request.

    A place that withdraws its last request empties the barrier again. All but the waits are plain functions.
    """

    def __init__(self, n_places: int) -> None:
        self._live = [0] * n_places
        self._full = Gate(shut="no request yet")
        self._short = Gate()

    @property
    def is_full(self) -> bool:
        """Whether every place is present now."""
        return self._full.is_open

    @property
    def n_present(self) -> int:
        """Places with a live request."""
        return sum(1 for count in self._live if count)

    def arrive(self, index: int) -> None:
        """A request of place `index` began to live."""
        self._live[index] += 1
        self._update()

    def withdraw(self, index: int) -> None:
        """A request of place `index` ended."""
        assert self._live[index] > 0, "a withdrawal without an arrival"
        self._live[index] -= 1
        self._update()

    async def wait_full(self) -> None:
        """Return at a moment when every place is present. Cancellation: safe."""
        await self._full.wait_open()

    async def wait_not_full(self) -> None:
        """Return at a moment when a place is absent. Cancellation: safe."""
        await self._short.wait_open()

    def _update(self) -> None:
        if all(self._live):
            self._full.open()
            self._short.shut("every place is present")
        elif self._full.is_open:
            self._full.shut("a place withdrew")
            self._short.open()
