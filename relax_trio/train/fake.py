"""A trainer for tests on the virtual clock: takes the time it is told to, remembers what it was given. No torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from attrs import define, field

from relax_trio.backend.base import WeightSource
from relax_trio.data.json import JsonObject
from relax_trio.data.sample import Sample
from relax_trio.errors import TrainError
from relax_trio.ids import WeightVersion
from relax_trio.train.base import version_of
from relax_trio.train.checkpoint import write_checkpoint


@define(eq=False, kw_only=True)
class FakeTrainer:
    """`Trainer` whose phases last `step_s` and change nothing but the version.

    Attributes:
      step_s: seconds of a phase on Trio's clock; of its end, where it takes its rows as they come.
      consume_s: seconds of consuming one batch of such a phase.
      save_s: seconds of a save; the checkpoint it writes is complete but holds no model.
      failures: rollout id → error that its phase raises after `step_s`.
      n_phases: completed phases.
      steps: (rollout id, rows) of every phase begun, in order.
      batches: (time, rollout id, rows) of every batch consumed, in order.
      saves: (path, state) of every checkpoint, in order.
    """

    step_s: float = 1.0
    consume_s: float = 0.0
    save_s: float = 0.0
    failures: Mapping[int, TrainError] = field(factory=dict)
    n_phases: int = 0
    steps: list[tuple[int, tuple[Sample, ...]]] = field(factory=list, init=False)
    batches: list[tuple[float, int, int]] = field(factory=list, init=False)
    saves: list[tuple[Path, JsonObject]] = field(factory=list, init=False)

    @property
    def weight_version(self) -> WeightVersion:
        """See `Trainer.weight_version`."""
        return version_of(self.n_phases)

    async def step(self, rollout_id: int, samples: Sequence[Sample]) -> dict[str, float]:
        """See `Trainer.step`. Cancellation: at once, version unchanged."""
        self.steps.append((rollout_id, tuple(samples)))
        await trio.sleep(self.step_s)
        if rollout_id in self.failures:
            raise self.failures[rollout_id]
        self.n_phases += 1
        return _metrics(samples)

    @asynccontextmanager
    async def phase(self, rollout_id: int) -> AsyncIterator[_FakePhase]:
        """See `Trainer.phase`. Cancellation: at once, version unchanged."""
        phase = _FakePhase(self, rollout_id)
        yield phase
        await self.step(rollout_id, phase.rows)
        phase.is_done = True

    def weights(self) -> WeightSource:
        """See `Trainer.weights`: no tensors."""
        return WeightSource(tensors={})

    async def save(self, directory: Path, state: JsonObject) -> Path:
        """See `Trainer.save`. Writes in place, after `save_s`."""
        await trio.sleep(self.save_s)
        path = write_checkpoint(directory, self.n_phases, lambda _: None, state)
        self.saves.append((path, state))
        return path


@define(eq=False)
class _FakePhase:
    """See `Phase`."""

    trainer: FakeTrainer
    rollout_id: int
    rows: list[Sample] = field(factory=list)
    is_done: bool = False

    async def consume(self, samples: Sequence[Sample]) -> None:
        """See `Phase.consume`."""
        seen = {sample.index for sample in self.rows}
        assert not any(sample.index in seen for sample in samples), "all contexts of a Session come in one batch"
        self.trainer.batches.append((trio.current_time(), self.rollout_id, len(samples)))
        await trio.sleep(self.trainer.consume_s)
        self.rows += samples

    @property
    def metrics(self) -> dict[str, float]:
        """See `Phase.metrics`."""
        assert self.is_done, "metrics of a phase that has not ended"
        return _metrics(self.rows)


def _metrics(samples: Sequence[Sample]) -> dict[str, float]:
    names = ("loss", "grad_norm", "lr", "entropy", "ppo_kl", "pg_clipfrac", "rollout_logprob_abs_diff")
    n_tokens = sum(sum(sample.loss_mask) for sample in samples)
    return {f"train/{name}": 0.0 for name in names} | {"train/n_tokens": float(n_tokens)}
