"""Measures that training learns: three small tasks, several seeds, each with and without a learning rate.

    python tools/run_suite.py

Every run is `relax-trio train --config examples/suite/TASK.yaml`. Held out, answered greedily, a run must rise by at
least 0.15, its control (`--lr 0`) move by at most 0.05. Results are kept beside each run, so that what is finished is
not repeated, and the page (docs/results.md; with `--steps` results.md beside the runs) is written anew after each one,
from all that was measured. The exit status is 1 where a run that was asked for missed its bound or failed. Two cores
take about a minute a run.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import yaml

from relax_trio.observe.curve import draw_curve_text

ROOT = Path(__file__).resolve().parents[1]
SUITE = ROOT / "examples" / "suite"
sys.path.insert(0, str(SUITE))

import make  # noqa: E402  # a program of the suite, which is no package

TASKS = {
    "arithmetic": "arithmetic with a tool",
    "search": "two agents, a searcher and a solver, each with credit of its own",
    "game": "a game of several turns, rewarded by its outcome",
}
SEEDS = (1, 2, 3, 4, 5)
RISE_MIN = 0.15
CONTROL_MOVE_MAX = 0.05
RESULT_FILE = "result.json"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run."""

    task: str
    seed: int
    is_control: bool
    n_steps: int

    @property
    def directory(self) -> str:
        return f"{self.task}-seed{self.seed}-{'control' if self.is_control else 'train'}-{self.n_steps}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a finished run showed.

    Attributes:
      sources: `fingerprint` of the task when it was run; a result of other sources is not counted.
      rewards: mean reward of each step.
      held_out: steps done and mean reward of each greedy evaluation, in order.
      lr: largest learning rate of any step.
      n_failed: Sessions of the evaluations that failed.
      seconds: wall time of the command.
      finished: date and time, UTC.
      versions: of the checkout, Python and torch.
    """

    sources: str
    rewards: list[float]
    held_out: list[tuple[int, float]]
    lr: float
    n_failed: int
    seconds: float
    finished: str
    versions: str

    @property
    def rise(self) -> float:
        return self.held_out[-1][1] - self.held_out[0][1]


class RunFailed(Exception):
    """A run ended badly, or left no results that can be read."""


def plans(tasks: Sequence[str], seeds: Sequence[int], n_steps: int | None) -> list[Plan]:
    """All runs, in an order that tells most when it is stopped early: one seed of every task and control, then more.

    Args:
      n_steps: None for what the tasks' files say.
    """
    found = [
        Plan(task=task, seed=seed, is_control=is_control, n_steps=n_steps or configured_steps(task))
        for task in tasks
        for seed in seeds
        for is_control in (False, True)
    ]
    return sorted(found, key=lambda plan: (plan.is_control and plan.seed != seeds[0], seeds.index(plan.seed)))


def configured_steps(task: str) -> int:
    """`num-rollout` of a task's file."""
    return int(yaml.safe_load((SUITE / f"{task}.yaml").read_text(encoding="utf-8"))["rollout"]["num-rollout"])


def missed(plan: Plan, result: Result) -> str | None:
    """The bound that a run missed, in words."""
    if result.n_failed:
        return f"{result.n_failed} Sessions of its evaluations failed"
    if plan.is_control:
        if result.lr != 0:
            return "the control's learning rate is not 0"
        return None if abs(result.rise) <= CONTROL_MOVE_MAX else f"moved by more than {CONTROL_MOVE_MAX}"
    return None if result.rise >= RISE_MIN else f"rose by less than {RISE_MIN}"


@cache
def fingerprint(task: str) -> str:
    """16 hex digits over what a run is made of: configuration, rows, the model's name, programs without comments."""
    parts = [make.model_path(task, Path()).name, (SUITE / f"{task}.yaml").read_text(encoding="utf-8")]
    parts += [path.read_text(encoding="utf-8") for path in sorted(SUITE.glob(f"{task}_*.jsonl"))]
    programs = [ROOT / "examples/quickstart/agent.py"] if task == "arithmetic" else [SUITE / "model_api.py"]
    programs += sorted(path for path in SUITE.glob(f"{task}_*.py") if not path.stem.endswith("_task"))
    parts += [ast.unparse(ast.parse(path.read_text(encoding="utf-8"))) for path in programs]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def command(plan: Plan, model: Path, run_dir: Path) -> list[str]:
    """The command of a run, from the checkout's root."""
    middle = plan.n_steps // 2 if plan.n_steps % 2 == 0 else plan.n_steps
    words = [sys.executable, "-m", "relax_trio", "train", "--config", f"examples/suite/{plan.task}.yaml"]
    words += ["--hf-checkpoint", str(model), "--output-dir", str(run_dir)]
    words += ["--rollout-seed", str(plan.seed), "--seed", str(plan.seed)]
    words += ["--num-rollout", str(plan.n_steps), "--eval-interval", str(middle)]
    return [*words, "--lr", "0"] if plan.is_control else words


def run(plan: Plan, model: Path, run_dir: Path) -> Result:
    """Run a plan in a fresh directory and keep its result there.

    Raises:
      RunFailed: it ended badly, or its files lack something.
    """
    if run_dir.exists():
        shutil.rmtree(run_dir)  # of a run that did not finish
    words = command(plan, model, run_dir)
    print("==", *words[1:], file=sys.stderr, flush=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    sources, started = fingerprint(plan.task), time.monotonic()
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "PATH": path}, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise RunFailed(f"exit status {done.returncode}\n{done.stderr[-2000:]}")
    result = read_run(run_dir, sources, time.monotonic() - started)
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)  # a hundred runs would fill the disk
    (run_dir / RESULT_FILE).write_text(json.dumps(asdict(result)) + "\n", encoding="utf-8")
    return result


def read_run(run_dir: Path, sources: str, seconds: float) -> Result:
    """Read the run directory of a finished run.

    Raises:
      RunFailed: a file, a number or an evaluation is missing.
    """
    try:
        steps, evals = (_objects(run_dir / name) for name in ("metrics.jsonl", "eval.jsonl"))
        result = Result(
            sources=sources,
            rewards=[float(step["rollout/raw_reward"]) for step in steps],
            held_out=[(int(record["n_steps"]), float(record["eval/held_out"])) for record in evals],
            lr=max(float(step["train/lr"]) for step in steps),
            n_failed=sum(int(record["eval/held_out/n_failed"]) for record in evals),
            seconds=seconds,
            finished=time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
            versions=versions(),
        )
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise RunFailed(f"its files can't be read: {type(exc).__name__}: {exc}") from exc
    evaluated = [done for done, _ in result.held_out]
    if not evaluated or (evaluated[0], evaluated[-1]) != (0, len(steps)) or not all(map(math.isfinite, result.rewards)):
        raise RunFailed(f"{len(steps)} steps, evaluations after {evaluated}; needs one before and one after")
    return result


def versions() -> str:
    """Of the checkout, Python and torch."""
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "no commit"
    return f"{commit}, Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"


def _objects(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def kept(plan: Plan, runs: Path) -> Result | None:
    """The result of a finished run of this very plan and these sources."""
    path = runs / plan.directory / RESULT_FILE
    if not path.exists():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    values["held_out"] = [(int(done), float(reward)) for done, reward in values["held_out"]]
    result = Result(**values)
    return result if result.sources == fingerprint(plan.task) else None


def page(runs: Path, n_steps: int | None = None) -> str:
    """docs/results.md: the results that are there, and which are not."""
    found = {plan: kept(plan, runs) for plan in plans(tuple(TASKS), SEEDS, n_steps)}
    results = [result for result in found.values() if result is not None]
    if not results:
        return "# Results\n\nNothing was run.\n"
    dates = sorted(result.finished for result in results)
    text = HEAD.format(
        first=dates[0],
        last=dates[-1],
        n_cores=os.cpu_count(),
        versions="; ".join(sorted({result.versions for result in results})),
        n_done=len(results),
        n_all=len(found),
        rise=RISE_MIN,
        move=CONTROL_MOVE_MAX,
    )
    for task, title in TASKS.items():
        mine = {plan: result for plan, result in found.items() if plan.task == task}
        steps = next(iter(mine)).n_steps
        lines = ["", f"## {task.capitalize()}: {title}", "", f"{steps} steps a run.", "", *_table(mine), *_curves(mine)]
        text += "\n".join(lines) + "\n"
    return text


HEAD = """# Results

Does training learn? Three small tasks ([examples/suite](../examples/suite/README.md)), five seeds, each beside a
control whose learning rate is 0. Every number here was measured by

```text
python tools/run_suite.py
```

* {n_done} of {n_all} runs are done, from {first} to {last}, on {n_cores} cores that other work shared.
* Versions: {versions}.
* A step is 8 Groups of 8 Sessions. Held out: 64 rows that no run trains on, answered greedily before the first step,
  half-way and after the last.
* Bounds: a run rises by at least {rise}, its control moves by at most {move}.
"""


def _table(found: dict[Plan, Result | None]) -> list[str]:
    head = ["| seed | run | held out before | half-way | after | rise | first step | last step | seconds | verdict |"]
    head.append("|---|---|---|---|---|---|---|---|---|---|")
    return head + [_row(plan, found[plan]) for plan in sorted(found, key=lambda plan: (plan.is_control, plan.seed))]


def _row(plan: Plan, result: Result | None) -> str:
    kind = "control" if plan.is_control else "train"
    if result is None:
        return f"| {plan.seed} | {kind} |" + " |" * 7 + " not run |"
    wrong = missed(plan, result)
    middle = f"{result.held_out[1][1]:.3f}" if len(result.held_out) > 2 else ""
    cells = [f"{result.held_out[0][1]:.3f}", middle, f"{result.held_out[-1][1]:.3f}", f"{result.rise:+.3f}"]
    cells += [f"{result.rewards[0]:.2f}", f"{result.rewards[-1]:.2f}", f"{result.seconds:.0f}"]
    return f"| {plan.seed} | {kind} | {' | '.join(cells)} | {'met' if wrong is None else f'**MISSED**: {wrong}'} |"


def _curves(found: dict[Plan, Result | None]) -> list[str]:
    """Mean training reward of each step over the seeds, and that of the controls."""
    trained = [result.rewards for plan, result in found.items() if result and not plan.is_control]
    controls = [result.rewards for plan, result in found.items() if result and plan.is_control]
    if not trained:
        return []
    title = f"Mean reward of each step: {_runs(len(trained), 'run')}"
    title += f", {_runs(len(controls), 'control')}" if controls else ""
    control = _mean(controls) if controls else None
    drawing = draw_curve_text(_mean(trained), title=title, width=90, height=14, control=control)
    return ["", "```text", *(line.rstrip() for line in drawing.splitlines()), "```"]


def _runs(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _mean(curves: Iterable[list[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=tuple(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, help="steps of every run; by default what the tasks' files say")
    parser.add_argument("--runs", type=Path, default=Path("runs/suite"), help="where runs and models are kept")
    options = parser.parse_args(arguments)
    runs = options.runs.absolute()
    page_path = ROOT / "docs" / "results.md" if options.steps is None else runs / "results.md"
    models = {task: make.ensure_model(task, runs / "models") for task in options.tasks}
    passed = True
    for plan in plans(options.tasks, options.seeds, options.steps):
        result = kept(plan, runs)
        if result is None:
            try:
                result = run(plan, models[plan.task], runs / plan.directory)
            except RunFailed as exc:
                passed = False
                print(f"{plan.directory}: FAILED: {exc}", flush=True)
                continue
        wrong = missed(plan, result)
        passed &= wrong is None
        print(f"{plan.directory}: held out {result.rise:+.3f}, {wrong or 'met'}", flush=True)
        page_path.write_text(page(runs, options.steps), encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
