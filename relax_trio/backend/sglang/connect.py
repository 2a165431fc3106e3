"""From a URL to a server that is known to generate."""

from __future__ import annotations

import trio

from relax_trio.backend.sglang.client import SGLangClient
from relax_trio.backend.sglang.fleet import Server
from relax_trio.errors import BackendError, BackendProtocolError, BackendUnavailable, ConfigError
from relax_trio.events import emit

_INTERVAL_S = 0.5
_PROBE_S = 60.0
_TELL_AFTER_S = 10.0
_TELL_EVERY_S = 60.0


async def connect(client: SGLangClient, timeout_s: float, *, lost: Server | None = None) -> Server:
    """Wait until a server generates, and get to know it. A port that answers is not enough: the model may be loading.

    A wait that takes long is told of, with what is wrong: event `server.waiting`.

    Args:
      lost: what it was to this run before. It may have been lost while the run had it paused, so it is told to go on,
        and to end what it had then: nobody waits for that any more.

    Raises:
      BackendUnavailable: it did not within `timeout_s`; says what was wrong last.
      ConfigError: it is a router.

    Cancellation: safe.
    """
    problem, began_s, told = "nothing answers", trio.current_time(), 0
    with trio.move_on_after(timeout_s):
        while True:
            try:
                info = await client.info()
                if lost is not None:
                    await client.resume()
                    for rid in lost.left_behind:
                        await client.abort(rid)
                probe = await client.probe(_PROBE_S)
            except BackendError as exc:
                problem = str(exc)
                if isinstance(exc, BackendProtocolError) and await client.is_router():
                    raise ConfigError(
                        f"{client.url} is an SGLang router and no server; --sglang-router-ip HOST and "
                        f"--sglang-router-port PORT use its workers"
                    ) from exc
                waited_s = trio.current_time() - began_s
                if waited_s >= _TELL_AFTER_S + told * _TELL_EVERY_S:
                    told += 1
                    emit("server.waiting", server=client.name, seconds=round(waited_s), problem=problem)
                await trio.sleep(_INTERVAL_S)
            else:
                return Server(name=client.name, client=client, info=info, has_spans=probe.has_spans)
    raise BackendUnavailable(f"{client.name} at {client.url} does not generate after {timeout_s:g} s: {problem}")
