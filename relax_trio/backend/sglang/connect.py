"""From a URL to a server that is known to generate."""

from __future__ import annotations

import trio

from relax_trio.backend.sglang.client import SGLangClient
from relax_trio.backend.sglang.fleet import Server
from relax_trio.errors import BackendError, BackendProtocolError, BackendUnavailable, ConfigError

_INTERVAL_S = 0.5
_PROBE_S = 60.0


async def connect(client: SGLangClient, timeout_s: float) -> Server:
    """Wait until a server generates, and get to know it. A port that answers is not enough: the model may be loading.

    Raises:
      BackendUnavailable: it did not within `timeout_s`; says what was wrong last.
      ConfigError: it is a router.

    Cancellation: safe.
    """
    problem = "nothing answers"
    with trio.move_on_after(timeout_s):
        while True:
            try:
                info = await client.info()
                probe = await client.probe(_PROBE_S)
            except BackendError as exc:
                problem = str(exc)
                if isinstance(exc, BackendProtocolError) and await client.is_router():
                    raise ConfigError(
                        f"{client.url} is an SGLang router and no server; --sglang-router-ip HOST and "
                        f"--sglang-router-port PORT use its workers"
                    ) from exc
                await trio.sleep(_INTERVAL_S)
            else:
                return Server(name=client.name, client=client, info=info, has_spans=probe.has_spans)
    raise BackendUnavailable(f"{client.name} at {client.url} does not generate after {timeout_s:g} s: {problem}")
