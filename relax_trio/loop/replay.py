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
from relax_trio.loop.setup import seed_globals
from relax_trio.observe.dump import ContextFacts, RolloutDump
from relax_trio.observe.metrics import rollout_metrics, row_numbers
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
    stages = [_reward_stage(dump, record, config)]
    if stages[-1].difference is None:
        stages.append(await _credit_stage(rows, config, cpu))
    if stages[-1].difference is None:
        stages.append(_packing_stage(dump, record))
    if stages[-1].difference is None:
        stages += await cpu.run(partial(_model_stages, rows, record, config, weights, n_rollout))
    return stages


def _reward_stage(dump: RolloutDump, record: JsonObject, config: Config) -> Stage:
    """Rewards and what else metrics are made of: by row where the dump tells, then by the step's metrics."""
    rows, key = dump.samples, config.reward.reward_key
    try:
        odd = next(_odd_contexts(dump, key), None) or _first_odd(
            rollout_metrics(rows, reward_key=key), record, rel=1e-9
        )
    except RelaxTrioError as exc:
        odd = str(exc)
    text = f"rewards and metrics of {len({row.place for row in rows})} Sessions"
    return Stage(name="reward", text=text, difference=odd)


def _odd_contexts(dump: RolloutDump, reward_key: str | None) -> Iterator[str]:
    """Rows that aren't what the dump tells of their Sessions; how many of their tokens are trained is packing's."""
    rows: dict[str, list[Sample]] = {}
    for row in dump.samples:
        rows.setdefault(row.place, []).append(row)
    for session in dump.sessions:
        own = rows.pop(session.place, [])
        if session.contexts is None:
            continue
        names = [context.name for context in session.contexts]
        if names != [row.name for row in own]:
            told, found = (", ".join(map(_context, given)) or "none" for given in (names, [row.name for row in own]))
            yield f"session {session.place}: contexts {told} recorded, {found} found"
        for row, context in zip(own, session.contexts, strict=False):
            yield from _odd_numbers(row, context, reward_key)
        if session.weight_versions != tuple(span for row in own for span in row.weight_versions):
            yield f"session {session.place}: its weight versions are not those that were recorded"
    if dump.sessions and rows:
        yield f"session {next(iter(rows))}: is not among the Sessions of the step"


def _odd_numbers(row: Sample, context: ContextFacts, reward_key: str | None) -> Iterator[str]:
    found = {name: n for name, n in row_numbers(row, reward_key=reward_key).items() if math.isfinite(n)}
    for name in dict.fromkeys([*context.numbers, *found]):
        told, now = context.numbers.get(name), found.get(name)
        if told != now and name != "trained_tokens":
            shown = ("none" if number is None else f"{number:.9g}" for number in (told, now))
            yield "{}: {} {} recorded, {} found".format(_who(row), name, *shown)


async def _credit_stage(rows: Sequence[Sample], config: Config, cpu: CpuPool) -> Stage:
    """Credit of every Group, by the estimator or the user's function; reward hooks and filters have had their say."""
    if all(row.advantage is None for row in rows):
        return Stage(name="credit", text="not compared: the rows have none, as after rollout without training")
    scorer = RewardScorer(config.reward, hook_args(config), cpu)
    scorer.hooks = evolve(scorer.hooks, rm=None, keep=None)
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
        if row.advantage is None:
            yield f"{_who(row)}: no credit recorded"
        recorded, found = _as_tuple(row.advantage), _as_tuple(new.advantage)
        if len(recorded) != len(found):
            yield f"{_who(row)}: {len(recorded)} credits recorded, {len(found)} found"
        for turn, (a, b) in enumerate(zip(recorded, found, strict=False)):
            if not math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12):
                place = f", turn {turn}" if len(recorded) > 1 else ""
                yield f"{_who(row)}{place}: credit {a:.9g} recorded, {b:.9g} found"


def _packing_stage(dump: RolloutDump, record: JsonObject) -> Stage:
    rows, told = dump.samples, _told_trained(dump)
    text = f"{len(rows)} rows, {sum(sum(row.loss_mask) for row in rows)} trained tokens"
    for row in rows:
        try:
            check_sample(row)
        except RelaxTrioError as exc:
            return Stage(name="packing", text=text, difference=f"{_who(row)}: {exc}")
        if (odd := _odd_token(row)) is not None:
            return Stage(name="packing", text=text, difference=f"{_who(row)}, {odd}")
        n_trained = sum(row.loss_mask)
        if (n_told := told.get((row.place, row.name), n_trained)) != n_trained:
            what = f"{n_told:g} trained tokens recorded, {n_trained} found"
            return Stage(name="packing", text=text, difference=f"{_who(row)}: {what}")
    found = {"train/n_samples": len(rows), "train/n_tokens": sum(sum(row.loss_mask) for row in rows)}
    return Stage(name="packing", text=text, difference=_first_odd(found, record, rel=0.0))


def _told_trained(dump: RolloutDump) -> dict[tuple[str, str | None], float]:
    """Trained tokens of each place's contexts, where the dump tells."""
    return {
        (session.place, context.name): context.numbers["trained_tokens"]
        for session in dump.sessions
        for context in session.contexts or ()
    }


def _odd_token(row: Sample) -> str | None:
    """The first token of the response that can't be as it was generated, and why."""
    turn_of: list[int | None] = [None] * row.response_length
    for turn, (start, n) in enumerate(zip(row.turn_starts, row.turn_lens, strict=True)):
        if start < 0 or start + n > row.response_length:
            return f"token {start} of the response: its turn {turn} of {n} tokens is not inside the response"
        turn_of[start : start + n] = [turn] * n
    # A turn is trained as a whole or, where another context trains it, not at all.
    n_trained = [sum(row.loss_mask[start : start + n]) for start, n in zip(row.turn_starts, row.turn_lens, strict=True)]
    for t, (trained, logprob) in enumerate(zip(row.loss_mask, row.rollout_log_probs, strict=True)):
        of_turn = turn_of[t]
        token = f"token {t} of the response"
        if of_turn is None and trained:
            return f"{token}: is trained, but no turn generated it"
        if of_turn is not None and bool(trained) != (2 * n_trained[of_turn] > row.turn_lens[of_turn]):
            return f"{token}: its loss mask is {trained}, unlike that of most tokens of its turn {of_turn}"
        if not math.isfinite(logprob) or (trained and logprob > 1e-6):
            return f"{token}: {logprob} is no logprob"
    return None


def _model_stages(
    rows: Sequence[Sample], record: JsonObject, config: Config, weights: Weights | str, n_rollout: int | None
) -> list[Stage]:
    """Logprobs and loss; blocking."""
    if isinstance(weights, str):
        return [Stage(name=name, text=f"not compared: {weights}") for name in ("logprobs", "loss")]
    settings = TrainerSettings.of_config(config, n_rollout)
    seed_globals(config.train.seed)  # an adapter begins with random numbers
    updater = open_updater(settings, weights.hf_checkpoint, weights.resume)
    stages = [_logprob_stage(rows, record, config, updater)]
    if stages[0].difference is None:
        stages.append(_loss_stage(rows, record, config, updater))
    return stages


def _logprob_stage(rows: Sequence[Sample], record: JsonObject, config: Config, updater: Updater) -> Stage:
    if (odd := _odd_id(rows, updater.policy.n_vocab)) is not None:
        return Stage(name="logprobs", text="not computed", difference=odd)
    rollout = config.rollout
    found = recompute_logprobs(
        updater.policy,
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


def _odd_id(rows: Sequence[Sample], n_vocab: int) -> str | None:
    """The first token that the model doesn't have."""
    for row in rows:
        place = next((t for t, token in enumerate(row.tokens) if not 0 <= token < n_vocab), None)
        if place is not None:
            return f"{_who(row)}, token {place} of the row: id {row.tokens[place]}, but the model has {n_vocab} tokens"
    return None


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
    return f"session {row.place}, context {_context(row.name)}"


def _context(name: str | None) -> str:
    return "(implicit)" if name is None else name


def _as_tuple(credit: float | tuple[float, ...] | None) -> tuple[float, ...]:
    if credit is None:
        return ()
    return credit if isinstance(credit, tuple) else (credit,)
