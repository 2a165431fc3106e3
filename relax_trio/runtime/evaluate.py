"""Evaluation of one dataset: every row rolled out `n_samples` times, scored, never trained on.

Every Session is a Group of its own; where the reward hook is given whole Groups (`--group-rm`), a row is one Group.
"""

from __future__ import annotations

import math

import trio
from attrs import define, field, frozen

from relax_trio.data.sample import Sample
from relax_trio.data.task import TaskInput
from relax_trio.errors import CreditError, RewardError
from relax_trio.events import emit
from relax_trio.ids import group_id
from relax_trio.reward.reward import RewardScorer
from relax_trio.runtime.group import Complete, Group
from relax_trio.runtime.leases import LeaseDesk
from relax_trio.runtime.samples import build_samples
from relax_trio.runtime.shared import Shared, TurnLimits
from relax_trio.runtime.stall import Wait, long_waits, watch_stalls


@frozen(kw_only=True)
class EvalDataset:
    """One dataset to evaluate on.

    Attributes:
      n_samples: Sessions per row (G_d).
      concurrency: resident Groups (C_d), in Groups of `n_samples` Sessions: E_d = C_d * G_d Sessions at once.
    """

    name: str
    tasks: tuple[TaskInput, ...]
    n_samples: int
    concurrency: int


@frozen(kw_only=True)
class EvalResult:
    """What an evaluation yields.

    Attributes:
      samples: of every Session that completed, in order of row and repeat.
      n_failed: Sessions that failed; they have no reward and are not in `samples`.
    """

    name: str
    samples: tuple[Sample, ...]
    n_failed: int
    seconds: float


@define(eq=False, kw_only=True)
class Evaluation:
    """One run over one dataset.

    Attributes:
      session_retries, agent_retries: see `Group`.
      heartbeat_s: waits that are longer are told.
    """

    dataset: EvalDataset
    shared: Shared
    limits: TurnLimits
    scorer: RewardScorer
    session_retries: int = 2
    agent_retries: int = 0
    heartbeat_s: float = 60.0
    _live: list[Group] = field(factory=list)
    _results: dict[int, list[Sample]] = field(factory=dict)
    _rolled_out_s: float | None = None

    async def run(self) -> EvalResult:
        """Evaluate every row.

        Raises:
          RewardError, CreditError: a Session can't be scored.

        Cancellation: every Session is discarded and joined.
        """
        started_s = trio.current_time()
        dataset = self.dataset
        total = len(dataset.tasks) * dataset.n_samples
        failure: RewardError | CreditError | None = None
        emit("eval.started", dataset=dataset.name, sessions=total)
        async with trio.open_nursery() as watch:
            watch.start_soon(watch_stalls, self._waits, self.heartbeat_s, name="stalls")
            await self._run_all(total)
            self._rolled_out_s = trio.current_time()
            samples = [sample for number in sorted(self._results) for sample in self._results[number]]
            try:
                await self.scorer.score(samples, evaluation=True)
            except (RewardError, CreditError) as exc:
                failure = exc
            watch.cancel_scope.cancel(reason=f"eval {dataset.name} scored")
        if failure is not None:
            raise failure  # out here, so that the nursery does not wrap it
        result = EvalResult(
            name=dataset.name,
            samples=tuple(samples),
            n_failed=total - sum(len({sample.place for sample in rows}) for rows in self._results.values()),
            seconds=trio.current_time() - started_s,
        )
        emit("eval.completed", dataset=dataset.name, sessions=total, failed=result.n_failed, seconds=result.seconds)
        return result

    async def _run_all(self, total: int) -> None:
        """Roll out every row, E_d Sessions at a time."""
        permits = trio.CapacityLimiter(self.dataset.concurrency * self.dataset.n_samples // self._n_places)
        async with trio.open_nursery() as nursery:
            for number in range(total // self._n_places):
                group = self._group(number)
                await permits.acquire_on_behalf_of(group)
                self._live.append(group)
                nursery.start_soon(self._run_one, group, permits, name=f"eval {self.dataset.name} {group.id}")

    def _waits(self) -> list[Wait]:
        owner = f"eval {self.dataset.name}"
        if self._rolled_out_s is None:
            return [wait for group in self._live for wait in long_waits(owner, group, self.heartbeat_s)]
        since = trio.current_time() - self._rolled_out_s
        return [Wait(chain=(owner,), waits_for="its rewards", seconds=since)] if since >= self.heartbeat_s else []

    @property
    def _n_places(self) -> int:
        return self.dataset.n_samples if self.scorer.config.group_rm else 1

    def _group(self, number: int) -> Group:
        row, repeat = divmod(number * self._n_places, self.dataset.n_samples)
        return Group(
            id=group_id(number, evaluation=True),
            number=number,
            task=self.dataset.tasks[row],
            n_places=self._n_places,
            first_sample=repeat,
            mode="eval",
            limits=self.limits,
            shared=self.shared,
            leases=LeaseDesk(wanted=math.inf),
            session_retries=self.session_retries,
            agent_retries=self.agent_retries,
        )

    async def _run_one(self, group: Group, permits: trio.CapacityLimiter) -> None:
        try:
            outcome = await group.run()
        finally:
            permits.release_on_behalf_of(group)
            self._live.remove(group)
        if isinstance(outcome, Complete):
            self._results[group.number] = build_samples(group, outcome, self.shared.codec)
