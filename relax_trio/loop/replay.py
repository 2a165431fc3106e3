"""A recorded step once more, without engine and agents: from rewards to loss, stage by stage, beside what was recorded.

What is compared with the dump is compared row by row or token by token; what only the step's metrics tell, by them. The
first stage that differs ends the replay: what comes after would differ for its sake.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from attrs import evolve, frozen

from relax_trio.config.namespace import hook_args
from relax_trio.config.tree import Config
from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.sample import Sample
from relax_trio.errors import RelaxTrioError
from relax_trio.observe.dump import RolloutDump
from relax_trio.observe.metrics import rollout_metrics
from relax_trio.reward.judge import judge_group
from relax_trio.reward.reward import RewardScorer
from relax_trio.sync.cpu import CpuPool
from relax_trio.train.opening import open_updater
from relax_trio.train.packing import check_sample
from relax_trio.train.phase import run_phase
from relax_trio.train.recompute import recompute_logprobs
from relax_trio.train.settings import TrainerSettings
from relax_trio.train.update import Updater

REL = 1e-3
"""Relative difference of a metric of training that is one: float32 sums depend on what else the machine was doing."""

GAP = 1e-3
"""Nats by which a recorded logprob may differ beyond the largest gap of the step's metrics."""


@frozen(kw_only=True)
class Weights:
    """Where the weights of the step's beginning are.

    Attributes:
      hf_checkpoint: what the run began from.
      resume: the checkpoint after the step before; None for the first step.
    """

    hf_checkpoint: Path
    resume: Path | None


@frozen(kw_only=True)
class Stage:
    """What came of one stage.

    Attributes:
      name: reward, credit, packing, logprobs or loss.
      text: what was compared, or why nothing was.
      difference: the first one, with Session, context and token where it has them; None where there is none.
    """

    name: str
    text: str
    difference: str | None = None


async def replay(
    config: Config, dump: RolloutDump, record: JsonObject, weights: Weights | str, n_rollout: int | None, cpu: CpuPool
) -> list[Stage]:
    """Recompute a step.

    Args:
      config: the run's.
      dump: the step's rows.
      record: the step's metrics.
      weights: to recompute logprobs and loss with, or why there are none.
      n_rollout: steps of the run, for a decaying learning rate.
      cpu: where it is computed.

    Returns:
      The stages up to the first that differs.

    Raises:
      ConfigError: a hook or checkpoint can't be loaded.

    Cancellation: waits for the stage in hand.
    """
    rows = list(dump.samples)
    stages = [_reward_stage(rows, record, config)]
    if stages[-1].difference is None:
        stages.append(await _credit_stage(rows, config, cpu))
    if stages[-1].difference is None:
        stages.append(_packing_stage(rows, record))
    if stages[-1].difference is None:
        stages += await cpu.run(partial(_model_stages, rows, record, config, weights, n_rollout))
    return stages


def _reward_stage(rows: Sequence[Sample], record: JsonObject, config: Config) -> Stage:
    found = rollout_metrics(rows, reward_key=config.reward.reward_key)
    odd = _first_odd(found, record, rel=1e-9)
    return Stage(name="reward", text=f"metrics of {len({s.place for s in rows})} Sessions", difference=odd)


async def _credit_stage(rows: Sequence[Sample], config: Config, cpu: CpuPool) -> Stage:
    """Credit of every Group, by the estimator or by the user's function; filters have had their say."""
    if any(row.advantage is None for row in rows):
        return Stage(name="credit", text="not compared: the rows have none, as after rollout without training")
    scorer = RewardScorer(config.reward, hook_args(config), cpu)
    scorer.hooks = evolve(scorer.hooks, keep=None)
    again = [evolve(row, advantage=None) for row in rows]
    groups: dict[str, list[Sample]] = {}
    for row in again:
        groups.setdefault(row.group, []).append(row)
    for members in groups.values():
        try:
            given_up = await judge_group(members, scorer, assigns_credit=True)
        except RelaxTrioError as exc:
            return Stage(name="credit", text=f"{len(groups)} Groups", difference=str(exc))
        if given_up is not None:
            return Stage(name="credit", text=f"{len(groups)} Groups", difference=f"{members[0].group}: {given_up}")
    odd = next(_odd_credits(rows, again), None)
    return Stage(name="credit", text=f"{len(rows)} rows of {len(groups)} Groups", difference=odd)


def _odd_credits(rows: Sequence[Sample], again: Sequence[Sample]) -> Iterator[str]:
    for row, new in zip(rows, again, strict=True):
        recorded, found = _as_tuple(row.advantage), _as_tuple(new.advantage)
        if len(recorded) != len(found):
            yield f"{_who(row)}: {len(recorded)} credits recorded, {len(found)} found"
        for turn, (a, b) in enumerate(zip(recorded, found, strict=False)):
            if not math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12):
                place = f", turn {turn}" if len(recorded) > 1 else ""
                yield f"{_who(row)}{place}: credit {a:.9g} recorded, {b:.9g} found"


def _packing_stage(rows: Sequence[Sample], record: JsonObject) -> Stage:
    text = f"{len(rows)} rows, {sum(sum(row.loss_mask) for row in rows)} trained tokens"
    for row in rows:
        try:
            check_sample(row)
        except RelaxTrioError as exc:
            return Stage(name="packing", text=text, difference=f"{_who(row)}: {exc}")
        if (token := _odd_token(row)) is not None:
            what = "a logprob beside the loss mask or one that is no number"
            return Stage(name="packing", text=text, difference=f"{_who(row)}, token {token}: {what}")
    found = {"train/n_samples": len(rows), "train/n_tokens": sum(sum(row.loss_mask) for row in rows)}
    return Stage(name="packing", text=text, difference=_first_odd(found, record, rel=0.0))


def _odd_token(row: Sample) -> int | None:
    """The first token of the response whose logprob can't be one of a generated token, or of one that wasn't."""
    values = zip(row.loss_mask, row.rollout_log_probs, strict=True)
    return next((t for t, (m, p) in enumerate(values) if not math.isfinite(p) or (m and p > 1e-6)), None)


def _model_stages(
    rows: Sequence[Sample], record: JsonObject, config: Config, weights: Weights | str, n_rollout: int | None
) -> list[Stage]:
    """Logprobs and loss; blocking."""
    if isinstance(weights, str):
        return [Stage(name=name, text=f"not compared: {weights}") for name in ("logprobs", "loss")]
    settings = TrainerSettings.of_config(config, n_rollout)
    updater = open_updater(settings, weights.hf_checkpoint, weights.resume)
    stages = [_logprob_stage(rows, record, config, updater)]
    if stages[0].difference is None:
        stages.append(_loss_stage(rows, record, config, updater))
    return stages


def _logprob_stage(rows: Sequence[Sample], record: JsonObject, config: Config, updater: Updater) -> Stage:
    rollout = config.rollout
    found = recompute_logprobs(
        updater.policy.model,
        rows,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
    )
    told = record.get("train/rollout_logprob_abs_diff")
    bound = GAP + (told if isinstance(told, int | float) else 0.0)
    largest = 0.0
    for row, values in zip(rows, found, strict=True):
        for t, trained in enumerate(row.loss_mask):
            gap = abs(values[t] - row.rollout_log_probs[t]) if trained else 0.0
            if not gap <= bound:
                return Stage(
                    name="logprobs",
                    text=f"within {bound:.3g} nats",
                    difference=f"{_who(row)}, token {t} of the response: {row.rollout_log_probs[t]:.6f} recorded, "
                    f"{values[t]:.6f} found",
                )
            largest = max(largest, gap)
    return Stage(name="logprobs", text=f"largest difference {largest:.3g} nats")


def _loss_stage(rows: Sequence[Sample], record: JsonObject, config: Config, updater: Updater) -> Stage:
    if config.rollout.fully_async:
        return Stage(name="loss", text="not compared: with --fully-async it depends on when rows came")
    metrics = run_phase(updater, rows, lambda: None).metrics
    names = [name for name in metrics if isinstance(record.get(name), int | float)]
    odd = _first_odd({name: metrics[name] for name in sorted(names, key=_loss_first)}, record, rel=REL)
    return Stage(name="loss", text=f"{len(names)} metrics of the optimizer phase", difference=odd)


def _loss_first(name: str) -> tuple[bool, str]:
    return name != "train/loss", name


def _first_odd(found: Mapping[str, float], record: Mapping[str, JsonValue], *, rel: float) -> str | None:
    """The first metric that was recorded with another value."""
    for name, value in found.items():
        told = record.get(name)
        if isinstance(told, int | float) and not math.isclose(value, told, rel_tol=rel, abs_tol=rel / 100):
            return f"{name}: {told:.9g} recorded, {value:.9g} found"
    return None


def _who(row: Sample) -> str:
    return f"session {row.place}, context {'(implicit)' if row.name is None else row.name}"


def _as_tuple(credit: float | tuple[float, ...] | None) -> tuple[float, ...]:
    assert credit is not None, "rows without credit were sorted out"
    return credit if isinstance(credit, tuple) else (credit,)
