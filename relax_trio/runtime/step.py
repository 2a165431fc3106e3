"""The accounting window of one rollout step. Plain: it starts nothing and waits for nothing."""

from __future__ import annotations

from collections.abc import Mapping

import trio
from attrs import define, field, frozen

from relax_trio.data.sample import Sample
from relax_trio.runtime.ledger import Partition, ScoredGroup


@define(kw_only=True)
class Tally:
    """What happened since the last step closed, for its metrics.

    Attributes:
      n_dropped: Groups that ended without being trained on.
      n_failed_sessions: Sessions that failed, those that were tried again included.
      n_filtered: dropped Groups that a filter or the custom advantage gave up; their rows are done.
      n_stale: dropped Groups whose oldest turn was too old.
    """

    n_dropped: int = 0
    n_failed_sessions: int = 0
    n_filtered: int = 0
    n_stale: int = 0


@frozen(kw_only=True)
class StepResult:
    """What a closed step hands to transfer.

    Attributes:
      groups: the scored Groups of its partition; in order of their numbers where a step ends with its partition, in
        the order of scoring where it doesn't.
      seconds: from open to close, on the Trio clock.
      kv_metrics: `agentic_kv/*`, of the time since the step before closed.
    """

    rollout_id: int
    groups: tuple[ScoredGroup, ...]
    n_dropped: int
    n_failed_sessions: int
    n_filtered_groups: int = 0
    n_stale_groups: int = 0
    n_set_aside_rows: int
    seconds: float
    kv_metrics: Mapping[str, float | None] = field(factory=dict)

    @property
    def samples(self) -> list[Sample]:
        """All training rows, in order of Group, place and export."""
        return [sample for group in self.groups for sample in group.samples]


@define(eq=False, kw_only=True)
class Step:
    """One open step.

    Attributes:
      partition: what it fills; None for the backfill, which pays old debt only.
      closed: set when it is over.
    """

    rollout_id: int
    partition: Partition | None
    closed: trio.Event = field(factory=trio.Event)
    _opened_s: float = field(factory=trio.current_time)

    @property
    def n_scored(self) -> int:
        """Groups that its partition has."""
        return 0 if self.partition is None else len(self.partition.groups)

    @property
    def age_s(self) -> float:
        """Seconds since it was opened."""
        return trio.current_time() - self._opened_s
