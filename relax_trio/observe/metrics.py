"""Metrics of a step: numbers made from its samples, and the file they are kept in.

Owns the names `rollout/*` and `<metadata field>/*`, and RUN_DIR/metrics.jsonl. Not covered: `train/*` (the trainer's),
`perf/*` (the loop's clock), writers for other systems.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from attrs import frozen

from relax_trio.data.json import JsonObject, parse_json
from relax_trio.data.sample import Sample
from relax_trio.errors import ConfigError, boundary
from relax_trio.events import emit
from relax_trio.ids import GroupId, PlaceId
from relax_trio.observe.rundir import METRICS_FILE
from relax_trio.reward.value import numeric_fields, primary_reward

MetricValue: TypeAlias = "float | int | None"


def rollout_metrics(samples: Sequence[Sample], *, reward_key: str | None) -> dict[str, float]:
    """Make the numbers of a step's rows.

    Over logical Sessions (rows of one place are one Session, whose reward is the mean of those its rows carry; a
    Session without reward is not counted): `rollout/raw_reward` (mean) and `rollout/raw_reward/std|min|max`,
    `rollout/zero_std_groups` (Groups in which all rewards are equal, so that nothing is learned from them),
    `rollout/n_sessions`, `rollout/n_groups`.

    Over rows: `rollout/n_samples`, `rollout/response_len/mean|max` (tokens after the prompt),
    `rollout/generated_len/mean|max` (tokens the model wrote), `rollout/total_len/max` (with the prompt),
    `rollout/turns/mean|max`, `rollout/truncated_ratio`; `rollout/<field>/mean|median|max|min` for the other numbers of
    reward objects; `<field>/mean|median|max|min` for top-level numbers of metadata, over the rows that have them.

    A field whose name is taken by one of the above is left out, told as event `metrics.shadowed`.

    Raises:
      CreditError: a reward object that `reward_key` doesn't open.
    """
    if not samples:
        return {"rollout/n_sessions": 0, "rollout/n_groups": 0, "rollout/n_samples": 0}
    out = {**_reward_metrics(samples, reward_key), **_length_metrics(samples)}
    helpers = (
        (f"rollout/{name}", value)
        for sample in samples
        if isinstance(sample.reward, dict)
        for name, value in numeric_fields(sample.reward).items()
        if name != reward_key
    )
    _add_fields(out, helpers)
    _add_fields(out, (pair for sample in samples for pair in numeric_fields(sample.output_metadata).items()))
    return out


def row_numbers(sample: Sample, *, reward_key: str | None) -> dict[str, float]:
    """The numbers of one row that credit, packing and the step's metrics are made of.

    Raises:
      CreditError: a reward object that `reward_key` doesn't open.
    """
    helpers = numeric_fields(sample.reward) if isinstance(sample.reward, dict) else {}
    return {
        "index": sample.index,
        **({} if sample.reward is None else {"reward": primary_reward(sample, reward_key)}),
        **{f"reward/{name}": value for name, value in helpers.items()},
        **{f"metadata/{name}": value for name, value in numeric_fields(sample.output_metadata).items()},
        "is_truncated": int(sample.status == "truncated"),
        "turns": len(sample.turn_lens),
        "generated_len": sum(sample.turn_lens),
        "response_len": sample.response_length,
        "total_len": len(sample.tokens),
        "trained_tokens": sum(sample.loss_mask),
    }


def _reward_metrics(samples: Sequence[Sample], reward_key: str | None) -> dict[str, float]:
    carried: dict[PlaceId, list[float]] = {}
    groups: dict[GroupId, list[float]] = {}
    group_of = {sample.place: sample.group for sample in samples}
    for sample in samples:
        if sample.reward is not None:
            carried.setdefault(sample.place, []).append(primary_reward(sample, reward_key))
    rewards = {place: statistics.fmean(values) for place, values in carried.items()}
    for place, reward in rewards.items():
        groups.setdefault(group_of[place], []).append(reward)
    out: dict[str, float] = {
        "rollout/n_sessions": len(group_of),
        "rollout/n_groups": len(set(group_of.values())),
        "rollout/n_samples": len(samples),
        "rollout/zero_std_groups": sum(1 for values in groups.values() if min(values) == max(values)),
    }
    if rewards:
        values = list(rewards.values())
        out["rollout/raw_reward"] = statistics.fmean(values)
        out["rollout/raw_reward/std"] = statistics.pstdev(values) if all(map(math.isfinite, values)) else math.nan
        out["rollout/raw_reward/min"] = min(values)
        out["rollout/raw_reward/max"] = max(values)
    return out


def _length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    columns = {
        "rollout/response_len": [sample.response_length for sample in samples],
        "rollout/generated_len": [sum(sample.turn_lens) for sample in samples],
        "rollout/turns": [len(sample.turn_lens) for sample in samples],
    }
    out: dict[str, float] = {}
    for name, column in columns.items():
        out[f"{name}/mean"] = statistics.fmean(column)
        out[f"{name}/max"] = max(column)
    out["rollout/total_len/max"] = max(len(sample.tokens) for sample in samples)
    out["rollout/truncated_ratio"] = statistics.fmean(sample.status == "truncated" for sample in samples)
    return out


def _add_fields(out: dict[str, float], pairs: Iterable[tuple[str, float]]) -> None:
    """Add the statistics of every field to `out`, where its names are free."""
    columns: dict[str, list[float]] = {}
    for name, value in pairs:
        columns.setdefault(name, []).append(value)
    for name, column in columns.items():
        stats = {f"{name}/{stat}": value for stat, value in _spread(column).items()}
        if taken := stats.keys() & out.keys():
            emit("metrics.shadowed", field=name, taken=min(taken))
            continue
        out.update(stats)


def _spread(column: list[float]) -> dict[str, float]:
    if not all(math.isfinite(value) for value in column):
        return dict.fromkeys(("mean", "median", "max", "min"), math.nan)
    return {
        "mean": statistics.fmean(column),
        "median": statistics.median(column),
        "max": max(column),
        "min": min(column),
    }


@frozen
class MetricsWriter:
    """Appends one JSON object per step to RUN_DIR/metrics.jsonl.

    Small blocking writes, each flushed to the system before it returns: a killed run loses no finished step.
    """

    run_dir: Path

    @property
    def path(self) -> Path:
        """The file."""
        return self.run_dir / METRICS_FILE

    def rewind(self, first_rollout_id: int) -> None:
        """Drop what a run that is now resumed wrote for steps from `first_rollout_id` on, and a torn last line.

        The file is replaced atomically. Call it once before the first `write` of a resumed run.
        """
        if not self.path.exists():
            return
        kept = [record for record in read_metrics(self.run_dir) if _step_of(record) < first_rollout_id]
        temporary = self.path.with_suffix(".jsonl.tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(temporary, self.path)

    def write(self, rollout_id: int, metrics: Mapping[str, MetricValue]) -> None:
        """Append the object of one step; a number that is not finite becomes null, told as `metrics.nonfinite`."""
        assert "rollout_id" not in metrics, "the step's number is given by itself"
        record: dict[str, MetricValue] = {"rollout_id": rollout_id}
        for name, value in metrics.items():
            if value is not None and not math.isfinite(value):
                emit("metrics.nonfinite", rollout=rollout_id, metric=name, value=str(value))
                value = None
            record[name] = value
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")


def read_metrics(run_dir: Path) -> list[JsonObject]:
    """Read the objects of a run, in order of steps; where a step was written twice, the last one stands.

    A torn last line (the run was killed while it wrote) is left out.

    Raises:
      ConfigError: no such file, or a line that is no step's object.
    """
    path = run_dir / METRICS_FILE
    with boundary(ConfigError, f"the metrics of {run_dir} can't be read", OSError):
        lines = path.read_text(encoding="utf-8").split("\n")
    by_step: dict[int, JsonObject] = {}
    for number, line in enumerate(lines[:-1], start=1):
        with boundary(ConfigError, f"{path}:{number} is no metrics object", ValueError):
            record = parse_json(line)
        if not isinstance(record, dict) or type(record.get("rollout_id")) is not int:
            raise ConfigError(f"{path}:{number} is no metrics object: it has no integer rollout_id")
        by_step[_step_of(record)] = record
    return [by_step[step] for step in sorted(by_step)]


def _step_of(record: JsonObject) -> int:
    step = record["rollout_id"]
    assert isinstance(step, int), "checked when it was read"
    return step
