"""tools/nightly and its check of the demo: a missed bound, a failed run or a crash makes the exit status 1.

The demo is a stub that writes run directories of made-up numbers.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"

GOOD = {"rewards": [0.3, 0.6, 0.9], "gaps": [1e-6, 2e-5, 1e-5], "held_out": [0.4, 0.8]}
CONTROL = {"rewards": [0.3, 0.5, 0.4, 0.2], "gaps": [1e-6] * 4, "held_out": [0.40, 0.42], "lr": 0.0}

STUB = """#!{python}
import os, shutil, sys
at = sys.argv.index("--output-dir")
home = {home!r}
with open(os.path.join(home, "commands.txt"), "a+") as file:
    print(os.environ["XDG_CACHE_HOME"], *sys.argv[1:], file=file, flush=True)
    file.seek(0)
    number = len(file.readlines())
names = (f"run{{number}}", "".join(sys.argv[at + 4 :]) or "plain")
found = [path for name in names if os.path.exists(path := os.path.join(home, name))]
if not found:
    sys.exit("the demo broke")
shutil.copytree(found[0], sys.argv[at + 1])
"""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("check_demo", TOOLS / "check_demo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_demo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["check_demo"]


def write_run(path, *, rewards, gaps, held_out, lr=1e-3):
    path.mkdir(parents=True)
    steps = [
        {"rollout/raw_reward": reward, "train/rollout_logprob_abs_diff": gap, "train/lr": lr}
        for reward, gap in zip(rewards, gaps, strict=True)
    ]
    evals = [
        {"n_steps": done, "eval/held_out": value}
        for done, value in zip((0, len(rewards)), held_out, strict=False)
        if value is not None
    ]
    for name, records in (("metrics.jsonl", steps), ("eval.jsonl", evals)):
        (path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where the stub of `relax-trio` takes its run directories from: by flags, or `runN` for the Nth command."""
    home = tmp_path / "runs"
    write_run(home / "plain", **GOOD)
    write_run(home / "--deterministic", **GOOD)
    write_run(home / "--lr0", **CONTROL)
    programs = tmp_path / "bin"
    programs.mkdir()
    install(programs / "relax-trio", STUB.format(python=sys.executable, home=str(home)))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return home


def install(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rewards": [0.45, 0.1, 0.80]}, []),
        ({"held_out": [0.5, 0.75]}, []),
        ({"rewards": [0.46, 0.6, 0.9]}, ["first step above 0.45"]),
        ({"rewards": [0.3, 0.95, 0.79]}, ["last step below 0.8"]),
        ({"held_out": [0.4, 0.64]}, ["held out rose by less than 0.25"]),
        ({"gaps": [1e-6, 2e-3, 1e-6]}, ["logprob gap above 0.001"]),
        ({"gaps": [None, 1e-6, 1e-6]}, ["logprob gap above 0.001"]),
        ({"gaps": [1e-6, 1e-6, None]}, ["logprob gap above 0.001"]),
        ({"rewards": [math.nan, 0.5, math.nan]}, ["first step above 0.45", "last step below 0.8"]),
    ],
)
def test_a_run_is_told_each_bound_it_missed(tool, tmp_path, change, words):
    run = tool.read_evidence(write_run(tmp_path / "run", **{**GOOD, **change}), 180.0)
    assert tool.missed_bounds(tool.Plan(seed=1), run) == words
    row = tool.table_row(tool.Plan(seed=1), run, words)
    assert ("MISSED" in row) == bool(words)
    assert row.count("|") == tool.HEADER.splitlines()[0].count("|")


def test_a_run_that_took_too_long_missed_a_bound(tool, tmp_path):
    run = tool.read_evidence(write_run(tmp_path / "run", **GOOD), 180.1)
    assert tool.missed_bounds(tool.Plan(seed=1), run) == ["took more than 180 s"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"held_out": [0.42, 0.38]}, []),
        ({"held_out": [0.40, 0.46]}, ["held out moved by more than 0.05"]),
        ({"held_out": [0.46, 0.40]}, ["held out moved by more than 0.05"]),
        ({"lr": 1e-4}, ["the control's learning rate is not 0"]),
    ],
)
def test_the_control_must_not_move(tool, tmp_path, change, words):
    run = tool.read_evidence(write_run(tmp_path / "run", **{**CONTROL, **change}), 10.0)
    assert tool.missed_bounds(tool.Plan(seed=1, is_control=True), run) == words


def test_the_drift_compares_the_halves_of_the_steps(tool):
    assert tool.drift([0.3, 0.5, 0.4, 0.2]) == pytest.approx(-0.1)
    assert tool.drift([0.1, 0.9, 0.3]) == pytest.approx(0.2)
    assert tool.drift([0.5]) == 0.0


@pytest.mark.parametrize(
    "change", [{"held_out": [0.4]}, {"held_out": []}, {"rewards": [0.3, 0.4, None]}, {"rewards": [], "gaps": []}]
)
def test_a_run_without_its_numbers_is_no_evidence(tool, tmp_path, change):
    with pytest.raises(tool.UnreadableRun):
        tool.read_evidence(write_run(tmp_path / "run", **{**GOOD, **change}), 1.0)
    with pytest.raises(tool.UnreadableRun, match="FileNotFoundError"):
        tool.read_evidence(tmp_path / "nowhere", 1.0)


def test_good_runs_pass_and_the_table_says_so(tool, home, capfd):
    assert tool.main(["--seeds", "5", "6"]) == 0
    table = capfd.readouterr().out
    assert table.count("| met |") == 5
    assert "second half of the steps less that of the first: -0.1000." in table
    assert "Deterministic runs of seed 5: the same rewards." in table
    commands = [line.split() for line in (home / "commands.txt").read_text().splitlines()]
    assert [words[words.index("--rollout-seed") + 1 :] for words in commands] == [
        ["5"],
        ["6"],
        ["5", "--lr", "0"],
        ["5", "--deterministic"],
        ["5", "--deterministic"],
    ]
    assert len({words[0] for words in commands}) == 1, "one cache, which is not the user's"
    assert not Path(commands[0][0]).exists()


def test_a_missed_bound_fails_and_marks_its_row(tool, home, capfd):
    write_run(home / "run2", **{**GOOD, "held_out": [0.4, 0.5]})
    assert tool.main(["--seeds", "5", "6"]) == 1
    marked = [line for line in capfd.readouterr().out.splitlines() if "MISSED" in line]
    assert len(marked) == 1
    assert marked[0].startswith("| 6 | none |")


def test_a_failed_run_fails_and_the_others_still_run(tool, home, capfd):
    shutil.rmtree(home / "--lr0")
    assert tool.main(["--seeds", "5"]) == 1
    out = capfd.readouterr()
    assert "| 5 | --lr 0 | **FAILED**: exit status 1 |" in out.out
    assert out.out.count("| met |") == 3
    assert "the demo broke" in out.err


def test_deterministic_runs_that_differ_fail(tool, home, capfd):
    write_run(home / "run4", **{**GOOD, "rewards": [0.3, 0.6000001, 0.9]})
    assert tool.main(["--seeds", "5"]) == 1
    assert "**MISSED**: not the same rewards twice" in capfd.readouterr().out


def nightly(tmp_path, *, check_demo=None):
    """Run a copy of the script, its tool replaced by `check_demo`, where every other program is a stub that passes."""
    checkout = tmp_path / "checkout"
    shutil.copytree(TOOLS, checkout / "tools")
    benches = ("bench_preload.py", "bench_api.py", "bench_engine.py", "bench_forest.py", "bench_train.py")
    for name in ("check_hour.py", "check_processes.py", "fuzz_api.py", *benches):
        (checkout / "tools" / name).write_text("print('met')\n")
    install(checkout / "tools" / "sglang_cpu_env", "#!/bin/sh\n")
    if check_demo is not None:
        (checkout / "tools" / "check_demo.py").write_text(check_demo)
    for name in ("ruff", "mypy", "pytest"):
        install(tmp_path / "bin" / name, "#!/bin/sh\necho passed\n")
    install(
        tmp_path / "bin" / "python",
        f'#!/bin/sh\ncase "$1" in tools/*) exec {sys.executable} "$@" ;; esac\necho 1.0\n',
    )
    done = subprocess.run(
        [checkout / "tools" / "nightly"],
        env={**os.environ, "SEEDS": "5", "REPEATS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    (page,) = (checkout / "docs" / "results").iterdir()
    return done.returncode, page.read_text()


def test_the_nightly_passes_when_all_does(home, tmp_path):
    status, page = nightly(tmp_path)
    assert (status, page.count("| met |"), "FAILED" in page, "MISSED" in page) == (0, 4, False, False)


def test_the_nightly_fails_with_the_demo(home, tmp_path):
    write_run(home / "run1", **{**GOOD, "rewards": [0.3, 0.6, 0.7]})
    status, page = nightly(tmp_path)
    assert (status, page.count("MISSED")) == (1, 1)


def test_the_nightly_fails_when_its_tool_crashes(home, tmp_path):
    status, page = nightly(tmp_path, check_demo="print('| met |')\n1 / 0\n")
    assert (status, page.count("| met |")) == (1, 1)
