"""Training runs whose own SGLang servers (stand-ins) are sent adapters, or lend their memory to the trainer."""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
from pathlib import Path

import pytest
from builders_commands import command, run, running, wait_until, write_rows
from builders_sglang import served_checkpoint
from sglang_agreement import dumps, metrics_of

pytestmark = pytest.mark.process

WIRE = Path(__file__).parents[1] / "sglang_wire_weights.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return served_checkpoint(tmp_path_factory.mktemp("runs") / "model")


@pytest.fixture
def words(checkpoint, tmp_path):
    """Of a run of two steps on a server that stands in for SGLang."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\nshift 2\nexec {sys.executable} {WIRE} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    data = write_rows(tmp_path / "rows.jsonl", 8)
    words = command("train", checkpoint, data, tmp_path / "run", "--num-rollout", "2", "--save-interval", "1")
    words += ["--rollout-backend", "sglang", "--sglang-python", str(python)]
    return [*words, "--save-debug-rollout-data", str(tmp_path / "run" / "samples-{rollout_id}.jsonl")]


def posts(out):
    """Paths that were posted to the server, but for attempts."""
    told = re.findall(r"^POST ([^?\s]+)", (out / "servers" / "sglang-0.log").read_text(), re.MULTILINE)
    return [path for path in told if path != "/abort_request"]


def versions(out):
    """Of the generated tokens, step by step."""
    return [{span.version for sample in dump.samples for span in sample.weight_versions} for dump in dumps(out)]


def flags_of(out):
    return re.findall(r"^flags: (.*)$", (out / "servers" / "sglang-0.log").read_text(), re.MULTILINE)


def test_each_step_has_the_servers_memory_and_its_weights_are_there_before_the_next(words, tmp_path):
    done = run([*words, "--colocate"])
    assert done.returncode == 0, done.stderr[-3000:]
    out = tmp_path / "run"
    assert "--enable-memory-saver" in flags_of(out)[0].split()
    step = [
        *("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_disk"),
        *("/resume_memory_occupation", "/flush_cache"),
    ]
    assert posts(out) == step * 2
    assert versions(out) == [{"0"}, {"1"}]


def test_a_server_that_is_started_again_gets_checkpoint_and_adapter_and_so_does_a_run_that_goes_on(words, tmp_path):
    out, log = tmp_path / "run", tmp_path / "console.log"
    adapter = ["--lora-rank", "4", "--sglang-lora-transfer", "adapter"]
    with running([*words, *adapter, "--sglang-tokens-per-s", "12"], temp=tmp_path / "tmp", log=log) as process:
        wait_until(lambda: (out / "metrics.jsonl").exists() and len(metrics_of(out)) == 1, within_s=90, log=log)
        wait_until(lambda: "server.updated" in (out / "run.log").read_text(), within_s=30, log=log)
        os.kill(int(re.search(r"server\.started .*pid=(\d+)", (out / "run.log").read_text())[1]), signal.SIGKILL)
        assert process.wait(120) == 0, log.read_text()[-3000:]
    assert "server.died" in (out / "run.log").read_text()
    assert versions(out) == [{"0"}, {"1"}]
    given = ["/load_lora_adapter", "/update_weight_version"]
    assert posts(out)[-5:] == [*given, *given, "/unload_lora_adapter"]  # after the start, and after the second step
    assert "--enable-lora --max-lora-rank 4" in flags_of(out)[0]

    again = [word.replace(str(out), str(tmp_path / "again")) for word in words]
    again[again.index("--num-rollout") + 1] = "3"
    done = run([*again, *adapter, "--load", str(out / "checkpoints"), "--trainer-processes", "2"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert versions(tmp_path / "again") == [{"2"}]
    assert posts(tmp_path / "again") == [*given, *given, "/unload_lora_adapter"]
