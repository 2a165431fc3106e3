"""What a run writes down: metrics of each step, evaluations, dumps of samples."""

from __future__ import annotations

import json
import statistics
from functools import partial
from pathlib import Path

from attrs import frozen

from relax_trio.config.tree import Config
from relax_trio.events import emit
from relax_trio.observe.dump import session_facts, write_rollout_dump
from relax_trio.observe.metrics import MetricsWriter, rollout_metrics
from relax_trio.reward.value import primary_reward
from relax_trio.runtime.evaluate import EvalResult
from relax_trio.runtime.step import StepResult
from relax_trio.sync.cpu import CpuPool

EVAL_FILE = "eval.jsonl"


@frozen(kw_only=True)
class Evidence:
    """Writers of one run."""

    config: Config
    run_dir: Path
    writer: MetricsWriter
    cpu: CpuPool

    @classmethod
    def open(cls, config: Config, run_dir: Path, cpu: CpuPool, first_step: int) -> Evidence:
        """Open the files; a resumed run first drops what it had written of the steps it runs again."""
        writer = MetricsWriter(run_dir)
        writer.rewind(first_step)
        return cls(config=config, run_dir=run_dir, writer=writer, cpu=cpu)

    def step(self, result: StepResult, train_metrics: dict[str, float], times: dict[str, float]) -> None:
        """Write the object of one step and tell its summary."""
        rollout = rollout_metrics(result.samples, reward_key=self.config.reward.reward_key)
        n_generated = sum(sum(sample.turn_lens) for sample in result.samples)
        metrics = {
            **rollout,
            "rollout/n_dropped_groups": float(result.n_dropped),
            "rollout/n_failed_sessions": float(result.n_failed_sessions),
            **times,
            "perf/rollout_tokens_per_s": n_generated / times["perf/rollout_time"]
            if times["perf/rollout_time"]
            else 0.0,
            **train_metrics,
        }
        self.writer.write(result.rollout_id, metrics)
        emit(
            "step.completed",
            rollout=result.rollout_id,
            reward=rollout.get("rollout/raw_reward"),
            loss=train_metrics.get("train/loss"),
            logprob_diff=train_metrics.get("train/rollout_logprob_abs_diff"),
            rollout_s=times["perf/rollout_time"],
            train_s=times.get("perf/train_time"),
        )

    async def dump(self, result: StepResult) -> None:
        """Write the step's samples where `--save-debug-rollout-data` says."""
        template = self.config.output.save_debug_rollout_data
        if template is None:
            return
        facts = [session_facts(report, result.samples) for group in result.groups for report in group.reports]
        await self.cpu.run(partial(write_rollout_dump, template, result.rollout_id, result.samples, sessions=facts))

    async def evaluation(self, n_done: int, result: EvalResult) -> None:
        """Append one evaluation to eval.jsonl and tell its reward; failed Sessions have none and are counted apart."""
        rewards = [primary_reward(sample, self.config.reward.reward_key) for sample in result.samples]
        mean = statistics.fmean(rewards) if rewards else None
        record = {
            "n_steps": n_done,
            f"eval/{result.name}": mean,
            f"eval/{result.name}/n_sessions": len(rewards),
            f"eval/{result.name}/n_failed": result.n_failed,
            "perf/eval_time": result.seconds,
        }
        with (self.run_dir / EVAL_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        emit("eval.scored", dataset=result.name, steps=n_done, reward=mean, failed=result.n_failed)
