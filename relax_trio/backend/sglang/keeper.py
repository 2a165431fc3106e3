"""What a keeper of servers is: it starts or finds them, follows their health and says when they are gone."""

from __future__ import annotations

from typing import Protocol

import trio

from relax_trio.backend.sglang.fleet import Fleet, Server
from relax_trio.backend.sglang.snapshots import Snapshots
from relax_trio.ids import WeightVersion


class Admit(Protocol):
    """Gives a server that is ready the current weights if it has others, and then work."""

    async def __call__(self, server: Server, has: WeightVersion | None) -> None:
        """Admit `server`.

        Args:
          has: the version that it was given by this run; None: only its own word is known, and another run may have
            called other weights by the same name.
        """
        ...


class Keeper(Protocol):
    """Starts or finds servers and follows their health."""

    async def keep(self, fleet: Fleet, snapshots: Snapshots, admit: Admit, started: trio.Event) -> None:
        """Keep servers in the fleet until cancelled; set `started` once the first is admitted.

        Raises:
          BackendUnavailable: no server can be had, or none any more.
        """
        ...
