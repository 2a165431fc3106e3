"""Which credential opens which Session. The only place that maps one to the other."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from relax_trio.api.sessions import Statistics
from relax_trio.data.json import JsonObject

if TYPE_CHECKING:
    from relax_trio.ids import Credential
    from relax_trio.runtime.session import Session


class SessionTable:
    """Live Sessions by credential; implements the API's `SessionDirectory`.

    Args:
      is_stopping: says whether the run is ending, so that new requests get a 503.
    """

    def __init__(self, is_stopping: Callable[[], bool]) -> None:
        self._is_stopping = is_stopping
        self._by_digest: dict[bytes, tuple[Credential, Session]] = {}

    @property
    def closing(self) -> bool:
        """Whether the run is ending."""
        return self._is_stopping()

    @contextmanager
    def listed(self, session: Session) -> Iterator[None]:
        """Make `session` reachable for the length of the block."""
        digest = _digest(session.credential)
        self._by_digest[digest] = (session.credential, session)
        try:
            yield
        finally:
            del self._by_digest[digest]

    def find(self, credential: str) -> Session | None:
        """The live Session that `credential` opens, or None.

        The lookup goes by SHA-256 and the comparison takes constant time, so that timing tells nothing.
        """
        entry = self._by_digest.get(_digest(credential))
        if entry is None or not hmac.compare_digest(entry[0].encode(), credential.encode()):
            return None
        return entry[1]

    def debug_state(self, *, forest: bool) -> JsonObject:
        """State of every live Session by place."""
        sessions = sorted((entry[1] for entry in self._by_digest.values()), key=lambda s: s.place)
        return {"sessions": [session.debug_state(forest=forest) for session in sessions]}

    def statistics(self) -> Statistics:
        """Counts over all live Sessions."""
        sessions = [entry[1] for entry in self._by_digest.values()]
        live = [call for session in sessions for call in session.calls if not call.done.is_set()]
        return Statistics(
            n_sessions=len(sessions),
            n_requests=Counter(call.waiting_for for call in live),
            n_attempts=sum(call.flight is not None for call in live),
        )


def _digest(credential: str) -> bytes:
    return hashlib.sha256(credential.encode("utf-8", "surrogatepass")).digest()
