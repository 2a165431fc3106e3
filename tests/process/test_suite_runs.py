"""A real step of each task of examples/suite: agents as processes, its own model, rows, hooks and configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax_trio.observe.dump import read_rollout_dump

ROOT = Path(__file__).parents[2]
CONTEXTS = {"arithmetic": {None}, "search": {"searcher", "solver"}, "game": {None}}

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def environment():
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def models(tmp_path_factory, environment):
    """The directory of each task's model, as `make.py` makes and prints it."""
    words = [sys.executable, "examples/suite/make.py", "--models", str(tmp_path_factory.mktemp("models"))]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ") for line in done.stdout.splitlines())


@pytest.mark.parametrize("task", CONTEXTS)
def test_a_task_trains_a_step(task, models, environment, tmp_path):
    words = ["-m", "relax_trio", "train", "--config", f"examples/suite/{task}.yaml", "--hf-checkpoint", models[task]]
    words += ["--num-rollout", "1", "--eval-interval", "1", "--output-dir", str(tmp_path / "run")]
    words += ["--save-debug-rollout-data", str(tmp_path / "dump-{rollout_id}.jsonl")]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]

    (step,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    evals = [json.loads(line) for line in (tmp_path / "run/eval.jsonl").read_text().splitlines()]
    rows = read_rollout_dump(tmp_path / "dump-0.jsonl").samples
    assert (step["rollout/n_sessions"], step["rollout/n_failed_sessions"]) == (64, 0)
    assert 0.1 < step["rollout/raw_reward"] < 0.9
    assert step["train/grad_norm"] > 0
    assert 0.2 <= evals[0]["eval/held_out"] <= 0.5
    assert {row.name for row in rows} == CONTEXTS[task]
