"""Training runs whose SGLang servers (stand-ins) die or hang in the middle of a step."""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
from collections import Counter
from pathlib import Path

import pytest
from builders_commands import command, running, wait_until, write_rows
from builders_sglang import served_checkpoint
from sglang_agreement import dumps, metrics_of

pytestmark = pytest.mark.process

WIRE = Path(__file__).parents[1] / "sglang_wire.py"
N_STEPS, N_GROUPS, N_SAMPLES = 2, 2, 2
N_SESSIONS = N_STEPS * N_GROUPS * N_SAMPLES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return served_checkpoint(tmp_path_factory.mktemp("runs") / "model")


def stand_in(path):
    """An executable that takes the place of the Python which has SGLang."""
    path.write_text(f'#!/bin/bash\nshift 2\nexec {sys.executable} {WIRE} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_hangs_in_a_step_costs_no_group_and_doubles_nothing(checkpoint, tmp_path, how):
    out, log = tmp_path / "run", tmp_path / "console.log"
    data = write_rows(tmp_path / "rows.jsonl", 2 * N_STEPS * N_GROUPS)
    words = command("train", checkpoint, data, out, "--num-rollout", str(N_STEPS))
    words += ["--rollout-backend", "sglang", "--sglang-num-servers", "2", "--sglang-tokens-per-s", "8"]
    words += ["--sglang-python", stand_in(tmp_path / "python"), "--engine-health-timeout", "2"]
    words += ["--agentic-session-lifecycle"]
    words += ["--save-debug-rollout-data", str(out / "samples-{rollout_id}.jsonl")]
    with running(words, temp=tmp_path / "tmp", log=log) as process:
        wait_until(lambda: all(_serves(out, index) for index in range(2)), within_s=60, log=log)
        os.kill(_pid(out, "SGLang server 0"), how)
        assert process.wait(90) == 0, log.read_text()[-3000:]
    told = (out / "run.log").read_text()
    reason = "SIGKILL" if how == signal.SIGKILL else "engine-health-timeout"
    assert re.search(rf"server\.died .*{reason}", told)
    assert "attempt.failed" in told
    metrics = metrics_of(out)
    assert len(metrics) == N_STEPS
    assert sum(step["rollout/n_failed_sessions"] for step in metrics) > 0
    assert [step["rollout/n_dropped_groups"] for step in metrics] == [0] * N_STEPS
    assert all("agentic_kv/session/close_failure" in step for step in metrics)
    assert sum(step["agentic_kv/session/close"] for step in metrics) > 0
    places = [sample.place for dump in dumps(out) for sample in dump.samples]
    assert len(places) == len(set(places)) == N_SESSIONS
    rows = Counter(sample.row for dump in dumps(out) for sample in dump.samples)
    assert rows == dict.fromkeys(range(N_STEPS * N_GROUPS), N_SAMPLES)


def _serves(out, index):
    """Whether an attempt of the run is on its way through a server; probes and health checks have no such name."""
    path = out / "servers" / f"sglang-{index}.log"
    return path.exists() and re.search(r"^generate [0-9a-f]{8}-\d+-", path.read_text(), re.MULTILINE) is not None


def _pid(out, name):
    return int(re.search(rf"server\.started server='{name}' pid=(\d+)", (out / "run.log").read_text())[1])
