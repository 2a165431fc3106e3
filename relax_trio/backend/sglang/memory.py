"""GPU memory that servers give up while somebody else needs it, and take back with weights.

A server exits when it is told to release while it is not idle, and a released server has neither weights nor cache. So
work is off it first, or put back into the queue of a paused one; its health is not asked by generating; and its own
word that it is idle comes before. Not covered: for how long (handover), what is loaded afterwards (exchange).
"""

from __future__ import annotations

from typing import Final

from relax_trio.backend.sglang.client import FLUSH_WAIT_S, MemoryTag
from relax_trio.backend.sglang.fleet import Server
from relax_trio.errors import ConfigError
from relax_trio.events import emit

ALL_TAGS: Final[tuple[MemoryTag, ...]] = ("kv_cache", "weights")


def require_memory_saver(server: Server) -> None:
    """Refuse a server that would keep its memory and say that it had released it.

    Raises:
      ConfigError: says which flag it lacks.
    """
    if not server.info.saves_memory:
        raise ConfigError(f"{server.name} can't release its memory: it was started without --enable-memory-saver")


async def give_up(server: Server) -> None:
    """Release the memory of a server that is held, and on which no attempt runs.

    Raises:
      BackendError: it is not idle, because somebody else uses it; it refuses; or no answer.

    Cancellation: the memory may be released.
    """
    assert not server.generating.is_open, "a server that releases its memory is held first"
    async with server.asking:  # an earlier question may still make it generate
        pass
    await server.client.flush_cache(0 if server.paused else FLUSH_WAIT_S)
    server.released.update(ALL_TAGS)  # before it is told: its answer may get lost
    await server.client.release_memory(ALL_TAGS)
    emit("server.memory_released", server=server.name)


async def take_back(server: Server, tag: MemoryTag) -> None:
    """Have a server allocate released memory again; nothing happens where it was not released.

    Raises:
      BackendError: refused, or no answer.
    """
    if tag in server.released:
        await server.client.resume_memory(tag)
        server.released.remove(tag)
