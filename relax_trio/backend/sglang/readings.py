"""The KV pools of SGLang servers, read off their Prometheus metrics at intervals."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import trio

from relax_trio.backend.capacity import READING_INTERVAL_S, Capacity, Reading
from relax_trio.backend.sglang.fleet import Server
from relax_trio.errors import BackendError, BackendProtocolError
from relax_trio.events import emit

_TOTAL, _USED, _USAGE = "sglang:max_total_num_tokens", "sglang:num_used_tokens", "sglang:token_usage"
_GAUGE = re.compile(rf"^({_TOTAL}|{_USED}|{_USAGE})[ \t]*(?:\{{.*\}})?[ \t]+(\S+)", re.MULTILINE)


def read_gauges(text: str, what: str) -> Reading:
    """Find a server's pool in the text of its metrics.

    Each rank has gauges of its own, of the same pool or of one like it: the largest value counts, never the sum.

    Args:
      text: Prometheus text format; anything else in it is skipped.
      what: names the server in messages.

    Raises:
      BackendProtocolError: a gauge is missing or no number.
    """
    found: dict[str, float] = {}
    for name, number in _GAUGE.findall(text):
        try:
            value = float(number)
        except ValueError as exc:
            raise BackendProtocolError(f"{what}: {name} is {number!r}, which is no number") from exc
        if math.isfinite(value):  # a rank that has nothing to tell yet
            found[name] = max(value, found.get(name, value))
    missing = [name for name in (_TOTAL, _USED, _USAGE) if name not in found]
    if missing:
        raise BackendProtocolError(f"{what}: no {' and no '.join(missing)} in its metrics (--enable-metrics)")
    if found[_TOTAL] < 1:
        raise BackendProtocolError(f"{what}: {_TOTAL} is {found[_TOTAL]:g}")
    return Reading(
        n_total_tokens=int(found[_TOTAL]), n_used_tokens=int(found[_USED]), token_usage=max(0.0, found[_USAGE])
    )


async def follow_servers(servers: Callable[[], Sequence[Server]], capacity: Capacity) -> None:
    """Keep the pools of the servers that take work in `capacity`; runs until it is cancelled.

    A server that is lost leaves at once; a new one is seen at the next interval. One that can't be read is told of when
    that begins, and goes stale.

    Args:
      servers: those that take work now.
    """
    known: set[Server] = set()
    async with trio.open_nursery() as nursery:
        while True:
            now = servers()
            for server in now:
                if server not in known:
                    capacity.follow(server)
                    nursery.start_soon(_follow, server, capacity, name=f"KV pool of {server.name}")
            known = set(now)
            await trio.sleep(READING_INTERVAL_S)


async def _follow(server: Server, capacity: Capacity) -> None:
    """One server, until it is lost."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_read, server, capacity, name=f"metrics of {server.name}")
        await server.gone.wait()
        nursery.cancel_scope.cancel(reason=f"{server.name} is gone")
    capacity.forget(server)


async def _read(server: Server, capacity: Capacity) -> None:
    problem: str | None = None
    while True:
        due_s = trio.current_time() + READING_INTERVAL_S
        error: str | None = f"no answer within {READING_INTERVAL_S:g} s"
        with trio.move_on_at(due_s):
            try:
                capacity.read(server, read_gauges(await server.client.metrics(), server.name))
                error = None
            except BackendError as exc:
                error = str(exc)
        if error is not None and problem is None:
            emit("server.unread", server=server.name, error=error)
        problem = error
        await trio.sleep_until(due_s)
