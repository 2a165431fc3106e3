"""The fully async loop: rollout and training at the same time, each with its own order of things.

The trainer takes a partition's rows as they are scored, and hands its new weights over at a moment when no attempt
runs; rollout goes on with windows of its own (runtime/overlap.py).
"""

from __future__ import annotations

import trio
from attrs import define

from relax_trio.loop.steps import TrainLoop
from relax_trio.runtime.ledger import Partition
from relax_trio.runtime.overlap import Overlap


@define(eq=False, kw_only=True)
class OverlapLoop(TrainLoop):
    """One fully async run over an open work."""

    async def run(self) -> None:
        """Run the steps that are left.

        Raises:
          RelaxTrioError: rollout, reward, training or the hand-over of weights failed; maybe in a group.

        Cancellation: as `TrainLoop.run`.
        """
        self.saved = self.trainer.weight_version
        await self.evaluate_if_due(self.first_step)
        overlap = Overlap(work=self.work, max_staleness=self.config.rollout.max_staleness)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(overlap.run, self.first_step, self.n_steps, name="rollout")
            for rollout_id in range(self.first_step, self.n_steps):
                partition = await overlap.wait_partition(rollout_id)
                await self._train(overlap, partition)
                await self.after_step(rollout_id + 1)

    async def _train(self, overlap: Overlap, partition: Partition) -> None:
        """Train on one partition as it fills, write its step down, hand the weights over."""
        rollout_id, started_s, waited_s = partition.rollout_id, trio.current_time(), 0.0
        transfer = overlap.transfer(partition, batch_sessions=self._batch_sessions)
        version = int(self.trainer.weight_version)
        async with self.trainer.phase(rollout_id) as phase:
            while True:
                asked_s = trio.current_time()
                batch = await transfer.next_batch(version)
                waited_s += trio.current_time() - asked_s
                if batch is None:
                    break
                await phase.consume(batch)
            self.remember(rollout_id + 1, partition)
        # Without a checkpoint in between: a step that is trained is written down, whatever stops the run now.
        result = overlap.seal(partition)
        train_s = trio.current_time() - started_s
        times = {
            "perf/rollout_time": result.seconds,
            "perf/train_time": train_s - waited_s,
            "perf/train_wait_time": waited_s,
            "perf/step_time": train_s,
            **self.times_before,
        }
        self.evidence.step(result, phase.metrics, times)
        self.save_s = None
        await self.evidence.dump(result)
        started_s = trio.current_time()
        await overlap.change_weights(self._update_weights)
        self.update_s = trio.current_time() - started_s

    async def _update_weights(self) -> None:
        await self.shared.backend.update_weights(self.trainer.weight_version, self.trainer.weights())

    @property
    def _batch_sessions(self) -> int:
        """global_batch_size / num_iters_per_train_update; the first is by default all Sessions of a step."""
        rollout, train = self.config.rollout, self.config.train
        n_sessions = train.global_batch_size or rollout.rollout_batch_size * rollout.n_samples_per_prompt
        return max(1, n_sessions // train.num_iters_per_train_update)
