"""`agentic_kv/*` of a step: what the backend counted of Sessions, and what admission did. Numbers only."""

from __future__ import annotations

from attrs import define, field

from relax_trio.runtime.shared import Shared

_SESSION_COUNTS = ("agentic_kv/session/close", "agentic_kv/session/close_failure")


@define(eq=False)
class KvTally:
    """Makes numbers of a time out of counts that only grow."""

    _before: dict[str, float] = field(factory=dict)

    def take(self, shared: Shared) -> dict[str, float | None]:
        """The numbers since the last call; none of what is switched off."""
        counted = shared.backend.load().extra
        metrics: dict[str, float | None] = {}
        if any(name in counted for name in _SESSION_COUNTS):
            for name in _SESSION_COUNTS:
                count = counted.get(name, 0.0)
                metrics[name] = count - self._before.get(name, 0.0)
                self._before[name] = count
        if shared.admission is not None:
            metrics |= shared.admission.take_metrics()
        return metrics
