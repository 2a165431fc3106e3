"""Runs the demo over several seeds, with its control, and checks what it must show.

    python tools/check_demo.py --seeds 1 2 3 >> docs/results/PAGE.md

Prints a table with a row per run and what each missed; progress goes to stderr. The exit status is 1 if a bound is
missed or a run failed. The first run makes the demo checkpoint, because the cache is a fresh one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FIRST_REWARD_MAX = 0.45
LAST_REWARD_MIN = 0.80
HELD_OUT_RISE_MIN = 0.25
CONTROL_MOVE_MAX = 0.05
LOGPROB_GAP_MAX = 1e-3
SECONDS_MAX = 180.0

HEADER = (
    "| seed | flags | first step | last step | held out before | held out after | largest logprob gap | seconds "
    "| verdict |\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run of the demo: its seed, its flags beside that, and whether it is the control that must not learn."""

    seed: int
    flags: tuple[str, ...] = ()
    is_control: bool = False


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a run left behind.

    Attributes:
      rewards: `rollout/raw_reward` of each step.
      gaps: `train/rollout_logprob_abs_diff` of each step, NaN where it is null: some logprob was not finite.
      rates: `train/lr` of each step.
      held_out: steps done and mean reward of each greedy evaluation, in order.
      seconds: wall time of the whole command.
    """

    rewards: list[float]
    gaps: list[float]
    rates: list[float]
    held_out: list[tuple[int, float]]
    seconds: float

    @property
    def held_out_rise(self) -> float:
        """Held-out reward after the last step less that before the first."""
        return self.held_out[-1][1] - self.held_out[0][1]


class UnreadableRun(Exception):
    """A run directory that lacks what a finished demo writes."""


def read_evidence(run_dir: Path, seconds: float) -> Evidence:
    """Read a run directory.

    Raises:
      UnreadableRun: a file, a step or a number in it is missing.
    """
    try:
        steps, evals = (_objects(run_dir / name) for name in ("metrics.jsonl", "eval.jsonl"))
        gaps = [step["train/rollout_logprob_abs_diff"] for step in steps]
        evidence = Evidence(
            rewards=[float(step["rollout/raw_reward"]) for step in steps],
            gaps=[math.nan if gap is None else float(gap) for gap in gaps],
            rates=[float(step["train/lr"]) for step in steps],
            held_out=[(int(record["n_steps"]), float(record["eval/held_out"])) for record in evals],
            seconds=seconds,
        )
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise UnreadableRun(f"{type(exc).__name__}: {exc}") from exc
    evaluated = [done for done, _ in evidence.held_out]
    if not steps or not evaluated or (evaluated[0], evaluated[-1]) != (0, len(steps)):
        raise UnreadableRun(f"{len(steps)} steps, evaluations after {evaluated} steps; needs one before and one after")
    return evidence


def _objects(path: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def missed_bounds(plan: Plan, run: Evidence) -> list[str]:
    """What the run should have shown and didn't, in words. A NaN misses every bound."""
    checks = [
        (max(run.gaps, key=_nan_last) <= LOGPROB_GAP_MAX, f"logprob gap above {LOGPROB_GAP_MAX:g}"),
        (run.seconds <= SECONDS_MAX, f"took more than {SECONDS_MAX:g} s"),
    ]
    if plan.is_control:
        checks += [
            (not any(run.rates), "the control's learning rate is not 0"),
            (abs(run.held_out_rise) <= CONTROL_MOVE_MAX, f"held out moved by more than {CONTROL_MOVE_MAX:g}"),
        ]
    else:
        checks += [
            (run.rewards[0] <= FIRST_REWARD_MAX, f"first step above {FIRST_REWARD_MAX:g}"),
            (run.rewards[-1] >= LAST_REWARD_MIN, f"last step below {LAST_REWARD_MIN:g}"),
            (run.held_out_rise >= HELD_OUT_RISE_MIN, f"held out rose by less than {HELD_OUT_RISE_MIN:g}"),
        ]
    return [words for passed, words in checks if not passed]


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def drift(rewards: list[float]) -> float:
    """Mean reward of the second half of the steps less that of the first; an odd step in the middle is in neither."""
    half = len(rewards) // 2
    return statistics.fmean(rewards[-half:]) - statistics.fmean(rewards[:half]) if half else 0.0


def table_row(plan: Plan, run: Evidence, missed: list[str]) -> str:
    """The run as a line of the table under `HEADER`."""
    cells = [str(plan.seed), " ".join(plan.flags) or "none", f"{run.rewards[0]:.4f}", f"{run.rewards[-1]:.4f}"]
    cells += [f"{run.held_out[0][1]:.4f}", f"{run.held_out[-1][1]:.4f}", f"{max(run.gaps, key=_nan_last):.1e}"]
    cells += [f"{run.seconds:.0f}", f"**MISSED**: {'; '.join(missed)}" if missed else "met"]
    return f"| {' | '.join(cells)} |"


def run_demo(plan: Plan, run_dir: Path, cache: Path) -> Evidence:
    """Run `relax-trio demo`, its output to stderr.

    Raises:
      UnreadableRun: it failed, or wrote no results.
    """
    command = ["relax-trio", "demo", "--output-dir", str(run_dir), "--rollout-seed", str(plan.seed), *plan.flags]
    print("==", *command, file=sys.stderr, flush=True)
    started = time.monotonic()
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
    if done.returncode:
        raise UnreadableRun(f"exit status {done.returncode}")
    return read_evidence(run_dir, time.monotonic() - started)


def check_plans(plans: Iterable[Plan], scratch: Path) -> bool:
    """Run the plans and print their table; whether all met their bounds.

    The runs with `--deterministic` and one seed must have the same rewards, step by step.
    """
    print(HEADER, flush=True)
    passed, notes = True, []
    twins: dict[int, list[list[float]]] = {}
    for number, plan in enumerate(plans):
        try:
            run = run_demo(plan, scratch / f"run{number}", scratch / "cache")
        except UnreadableRun as exc:
            passed = False
            print(f"| {plan.seed} | {' '.join(plan.flags) or 'none'} | **FAILED**: {exc} |", flush=True)
            continue
        missed = missed_bounds(plan, run)
        passed &= not missed
        print(table_row(plan, run, missed), flush=True)
        if plan.is_control:
            notes.append(
                f"* Control: mean training reward of the second half of the steps less that of the first: "
                f"{drift(run.rewards):+.4f}."
            )
        if "--deterministic" in plan.flags:
            twins.setdefault(plan.seed, []).append(run.rewards)
    for seed, runs in twins.items():
        same = len(runs) > 1 and all(rewards == runs[0] for rewards in runs)
        passed &= same
        verdict = "the same rewards" if same else f"**MISSED**: not the same rewards twice: {runs}"
        notes.append(f"* Deterministic runs of seed {seed}: {verdict}.")
    print("\n" + "\n".join(notes), flush=True)
    return passed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    seeds = parser.parse_args(arguments).seeds
    plans = [Plan(seed=seed) for seed in seeds]
    plans.append(Plan(seed=seeds[0], flags=("--lr", "0"), is_control=True))
    plans += [Plan(seed=seeds[0], flags=("--deterministic",))] * 2
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if check_plans(plans, Path(scratch)) else 1


if __name__ == "__main__":
    sys.exit(main())
