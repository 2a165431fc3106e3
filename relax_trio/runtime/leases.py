"""Who gives the lease: Groups whose barrier is full stand in line, and as many are leased as are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from relax_trio.events import emit

if TYPE_CHECKING:
    from relax_trio.runtime.group import Group


class LeaseDesk:
    """Leases Groups to Runtime, the lowest number first.

    A Group stands in line while its barrier is full; it leaves the line a moment after a place withdrew, or it was
    dropped, and is passed over until then. All methods are plain, so that a full barrier and the lease given for it
    have nothing between them.

    Args:
      wanted: leases to give; infinite where nothing limits them (evaluation).
    """

    def __init__(self, wanted: float = 0) -> None:
        self._wanted = wanted
        self._line: dict[int, Group] = {}

    @property
    def n_ready(self) -> int:
        """Groups that are prepared and wait for a lease."""
        return len(self._ready())

    def want(self, wanted: float) -> None:
        """So many leases may be given from now on, instead of what was said before."""
        self._wanted = wanted
        self._serve()

    @contextmanager
    def in_line(self, group: Group) -> Iterator[None]:
        """`group` may be leased within the block."""
        emit("group.prepared", group=group.id)
        self._line[group.number] = group
        self._serve()
        try:
            yield
        finally:
            self._line.pop(group.number, None)

    def _serve(self) -> None:
        while self._wanted > 0 and (ready := self._ready()):
            self._wanted -= 1
            self._line.pop(min(ready)).give_lease()

    def _ready(self) -> list[int]:
        return [number for number, group in self._line.items() if group.may_be_leased]
