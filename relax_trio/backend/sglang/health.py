"""Whether a server still lives, asked at intervals: nothing tells when a server hangs."""

from __future__ import annotations

import trio

from relax_trio.backend.sglang.fleet import Fleet, Server


async def watch_health(server: Server, fleet: Fleet, timeout_s: float) -> str:
    """Return, with the reason, once the server has not been well for `timeout_s` at most.

    A server that generates is well; while it is paused or loads weights, one that answers at all. One that is doubted
    is asked at once.

    Cancellation: safe.
    """
    interval_s, probe_s = timeout_s / 4, timeout_s * 3 / 4
    while True:
        with trio.move_on_after(interval_s):
            await server.doubted.wait()
        async with server.asking:
            paused, n_holds = not server.generating.is_open, server.n_holds
            is_alive = await server.client.is_alive(probe_s, paused=paused)
        # Paused while it was asked to generate: the answer says nothing.
        if not is_alive and (paused or n_holds == server.n_holds):
            return f"it was not well within --engine-health-timeout {timeout_s:g} s"
        fleet.trust(server)
