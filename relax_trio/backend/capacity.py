"""What servers say of their KV pools, and whether that is recent enough to build on. Plain: nothing is asked here."""

from __future__ import annotations

import math
from collections.abc import Hashable

import trio
from attrs import define, frozen

READING_INTERVAL_S = 2.0
"""How often each server is read."""

STALE_S = 3 * READING_INTERVAL_S
"""A server that was last read so long ago may hold anything by now."""


@frozen(kw_only=True)
class Reading:
    """One server's pool at one moment, over its ranks by the largest value.

    Attributes:
      n_total_tokens: size of the pool, at least 1.
      n_used_tokens: tokens that running attempts hold; cached ones that nobody holds are not counted.
      token_usage: share of the pool in use, as the server says it.
    """

    n_total_tokens: int
    n_used_tokens: int
    token_usage: float


@frozen(kw_only=True)
class Snapshot:
    """All pools together.

    Attributes:
      n_total_tokens: sum over servers.
      pressure: token usage of the worst server.
    """

    n_total_tokens: int
    pressure: float


@define(eq=False)
class _Followed:
    heard_s: float
    reading: Reading | None = None


class Capacity:
    """The latest reading of each server that takes work."""

    def __init__(self) -> None:
        self._followed: dict[Hashable, _Followed] = {}
        self._changed = trio.Event()
        self._n_readings = 0
        self._usage_sum = 0.0
        self._usage_max = 0.0

    def follow(self, server: Hashable) -> None:
        """A server takes work from now on. It counts once it has been read."""
        self._followed[server] = _Followed(trio.current_time())
        self._tell()

    def read(self, server: Hashable, reading: Reading) -> None:
        """A followed server was read now."""
        followed = self._followed[server]
        followed.heard_s, followed.reading = trio.current_time(), reading
        self._n_readings += 1
        self._usage_sum += reading.token_usage
        self._usage_max = max(self._usage_max, reading.token_usage)
        self._tell()

    def forget(self, server: Hashable) -> None:
        """A server takes no more work. Idempotent."""
        if self._followed.pop(server, None) is not None:
            self._tell()

    @property
    def snapshot(self) -> Snapshot | None:
        """What there is in all; None where nothing was read yet, or a server has not been heard of for `STALE_S`."""
        now = trio.current_time()
        if any(followed.heard_s + STALE_S <= now for followed in self._followed.values()):
            return None
        readings = [followed.reading for followed in self._followed.values() if followed.reading is not None]
        if not readings:
            return None
        return Snapshot(
            n_total_tokens=sum(reading.n_total_tokens for reading in readings),
            pressure=max(reading.token_usage for reading in readings),
        )

    @property
    def stale_at_s(self) -> float:
        """When the snapshot will be lost for want of a reading; infinite where it is lost already."""
        now = trio.current_time()
        due = (followed.heard_s + STALE_S for followed in self._followed.values())
        return min((at for at in due if at > now), default=math.inf)

    async def wait_changed(self) -> None:
        """Wait for the next `follow`, `read` or `forget`. Cancellation: safe."""
        await self._changed.wait()

    def take_usage(self) -> tuple[float, float] | None:
        """Mean and maximum of the token usage over all readings since the last call; None where there were none."""
        n, total, most = self._n_readings, self._usage_sum, self._usage_max
        self._n_readings, self._usage_sum, self._usage_max = 0, 0.0, 0.0
        return (total / n, most) if n else None

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
