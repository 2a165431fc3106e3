"""A gate that can be shut and opened again. Opening and shutting never checkpoint."""

from __future__ import annotations

import trio


class Gate:
    """Lets tasks through while it is open.

    Args:
      shut: reason it starts shut with; None: it starts open.
    """

    def __init__(self, shut: str | None = None) -> None:
        self._reason = shut
        self._opened = trio.Event()
        if shut is None:
            self._opened.set()

    @property
    def is_open(self) -> bool:
        """Whether `wait_open` would pass now."""
        return self._opened.is_set()

    @property
    def reason(self) -> str | None:
        """Why it is shut; None while it is open."""
        return self._reason

    def open(self) -> None:
        """Let everybody through from now on."""
        self._reason = None
        self._opened.set()

    def shut(self, reason: str) -> None:
        """Hold whoever comes from now on; who is through stays through."""
        self._reason = reason
        if self._opened.is_set():
            self._opened = trio.Event()

    async def wait_open(self) -> None:
        """Return at a moment when the gate is open (a shut in between holds the waiter again).

        Cancellation: safe at any time.
        """
        await trio.lowlevel.checkpoint()
        while not self.is_open:
            await self._opened.wait()
