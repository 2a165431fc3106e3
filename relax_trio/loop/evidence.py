"""What a run writes down: metrics of each step, evaluations, dumps of samples."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from attrs import frozen

from relax_trio.config.tree import Config
from relax_trio.data.json import JsonObject, parse_json
from relax_trio.data.sample import Sample
from relax_trio.errors import ConfigError, RunFailed, boundary
from relax_trio.events import emit
from relax_trio.observe.dump import session_facts, write_rollout_dump
from relax_trio.observe.metrics import MetricsWriter, rollout_metrics
from relax_trio.observe.passrate import pass_rates
from relax_trio.observe.rundir import EVAL_FILE
from relax_trio.observe.usage import memory_use, train_rate
from relax_trio.observe.writers import StepWriter
from relax_trio.runtime.evaluate import EvalResult
from relax_trio.runtime.step import StepResult
from relax_trio.sync.cpu import CpuPool


@frozen(kw_only=True)
class Evidence:
    """Writers of one run.

    Attributes:
      writers: other systems that get the metrics too.
      evaluated: (complete steps, dataset) of every evaluation that is written down.
    """

    config: Config
    run_dir: Path
    writer: MetricsWriter
    cpu: CpuPool
    evaluated: set[tuple[int, str]]
    writers: tuple[StepWriter, ...] = ()

    @classmethod
    def open(
        cls, config: Config, run_dir: Path, cpu: CpuPool, first_step: int, writers: tuple[StepWriter, ...] = ()
    ) -> Evidence:
        """Open the files; a resumed run first drops what it had written of the steps it runs again."""
        writer = MetricsWriter(run_dir)
        writer.rewind(first_step)
        evaluated = _rewind_evaluations(run_dir / EVAL_FILE, first_step)
        return cls(config=config, run_dir=run_dir, writer=writer, cpu=cpu, evaluated=evaluated, writers=writers)

    def step(self, result: StepResult, train_metrics: dict[str, float], times: dict[str, float]) -> None:
        """Write the object of one step and tell its summary. Plain.

        Raises:
          RunFailed: it can't be written.
        """
        rollout = rollout_metrics(result.samples, reward_key=self.config.reward.reward_key)
        n_generated = sum(sum(sample.turn_lens) for sample in result.samples)
        seconds = times["perf/rollout_time"]
        metrics = {
            **rollout,
            **self._pass_rates(result.samples, "rollout", by_row=False),
            **_runtime_metrics(result),
            **result.kv_metrics,
            **times,
            "perf/rollout_tokens_per_s": n_generated / seconds if seconds else 0.0,
            **train_rate(result.samples, times.get("perf/train_time")),
            **memory_use(),
            **train_metrics,
        }
        with boundary(RunFailed, f"metrics of step {result.rollout_id} can't be written", OSError):
            self.writer.write(result.rollout_id, metrics)
            for other in self.writers:
                other.write(result.rollout_id, metrics)
        emit(
            "step.completed",
            rollout=result.rollout_id,
            reward=rollout.get("rollout/raw_reward"),
            loss=train_metrics.get("train/loss"),
            logprob_diff=train_metrics.get("train/rollout_logprob_abs_diff"),
            rollout_s=seconds,
            train_s=times.get("perf/train_time"),
        )

    def _pass_rates(self, samples: Sequence[Sample], prefix: str, *, by_row: bool) -> dict[str, float]:
        """pass@k under `prefix`, where it is asked for."""
        if not self.config.reward.log_passrate:
            return {}
        rates = pass_rates(samples, reward_key=self.config.reward.reward_key, by_row=by_row)
        return {f"{prefix}/{name}": value for name, value in rates.items()}

    async def dump(self, result: StepResult) -> None:
        """Write the step's samples where `--save-debug-rollout-data` says.

        Raises:
          RunFailed: they can't be written.

        Cancellation: waits until they are written.
        """
        template = self.config.output.save_debug_rollout_data
        if template is None:
            return
        key = self.config.reward.reward_key
        facts = [
            session_facts(report, result.samples, reward_key=key) for group in result.groups for report in group.reports
        ]
        with boundary(RunFailed, f"samples of step {result.rollout_id} can't be written", OSError):
            await self.cpu.run(partial(write_rollout_dump, template, result.rollout_id, result.samples, sessions=facts))

    def has_evaluation(self, n_done: int, dataset: str) -> bool:
        """Whether this evaluation is written down already."""
        return (n_done, dataset) in self.evaluated

    def evaluation(self, n_done: int, result: EvalResult) -> None:
        """Append one evaluation to eval.jsonl and tell its reward. Plain.

        The mean is over Sessions; failed ones have no reward and are counted apart.

        Raises:
          RunFailed: it can't be written.
        """
        metrics = rollout_metrics(result.samples, reward_key=self.config.reward.reward_key)
        mean = metrics.get("rollout/raw_reward")
        record = {
            "n_steps": n_done,
            "dataset": result.name,
            f"eval/{result.name}": mean,
            f"eval/{result.name}/n_sessions": metrics["rollout/n_sessions"],
            f"eval/{result.name}/n_failed": result.n_failed,
            **self._pass_rates(result.samples, f"eval/{result.name}", by_row=True),
            "perf/eval_time": result.seconds,
        }
        with (
            boundary(RunFailed, f"the evaluation after step {n_done} can't be written", OSError),
            (self.run_dir / EVAL_FILE).open("a", encoding="utf-8") as file,
        ):
            file.write(json.dumps(record) + "\n")
        numbers = {n: v for n, v in record.items() if n.startswith("eval/") and isinstance(v, int | float)}
        for other in self.writers:
            other.write(n_done, numbers)
        self.evaluated.add((n_done, result.name))
        emit("eval.scored", dataset=result.name, steps=n_done, reward=mean, failed=result.n_failed)


def _runtime_metrics(result: StepResult) -> dict[str, float]:
    """What the runtime counted: drops, failures, rows set aside, unusual turns."""
    reports = [report for group in result.groups for report in group.reports]
    flags: Counter[str] = Counter()
    for report in reports:
        flags.update(report.flags)
    return {
        "rollout/n_dropped_groups": result.n_dropped,
        "rollout/n_failed_sessions": result.n_failed_sessions,
        "rollout/n_set_aside_rows": result.n_set_aside_rows,
        "rollout/n_filtered_groups": result.n_filtered_groups,
        "rollout/n_stale_groups": result.n_stale_groups,
        "rollout/n_aborted_attempts": sum(report.n_aborted for report in reports),
        "rollout/n_restored_turns": sum(report.n_restored for report in reports),
        "rollout/shared_trained_tokens": sum(report.n_shared_tokens for report in reports),
        **{f"rollout/turn_flags/{flag}": count for flag, count in sorted(flags.items())},
    }


def _rewind_evaluations(path: Path, first_step: int) -> set[tuple[int, str]]:
    """Drop evaluations after `first_step` complete steps, and a torn last line; returns those that are left.

    Raises:
      ConfigError: the file holds something else.
    """
    if not path.exists():
        return set()
    kept: list[JsonObject] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        with boundary(ConfigError, f"{path}:{number} is no evaluation", ValueError):
            record = parse_json(line)
        n_steps = record.get("n_steps") if isinstance(record, dict) else None
        if not isinstance(record, dict) or not isinstance(n_steps, int):
            raise ConfigError(f"{path}:{number} is no evaluation: it has no integer n_steps")
        if n_steps <= first_step:
            kept.append(record)
    temporary = path.with_suffix(".jsonl.tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(temporary, path)
    return {(int(str(record["n_steps"])), str(record.get("dataset"))) for record in kept}
