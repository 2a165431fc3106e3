"""Training runs whose attempts stay on paused SGLang servers (stand-ins) between steps."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from builders_commands import command, running, wait_until, write_rows
from builders_sglang import served_checkpoint
from sglang_agreement import dumps, metrics_of

pytestmark = pytest.mark.process

WIRE = Path(__file__).parents[1] / "sglang_wire.py"
N_STEPS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return served_checkpoint(tmp_path_factory.mktemp("paused") / "model")


@contextmanager
def somebodys_server(checkpoint, log):
    """The URL of a server that outlives the run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--model-path", str(checkpoint), "--weight-version", "theirs", "--tokens-per-s", "60", "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, WIRE, *words], stdout=out, stderr=out)
    try:
        yield f"http://127.0.0.1:{port}"
        assert process.poll() is None, log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()


def paused_run(checkpoint, tmp_path, url, *more):
    """Words of a run with turns of 12 to 48 tokens, of which each step leaves some unfinished."""
    data = write_rows(tmp_path / "rows.jsonl", 40)
    words = command("train", checkpoint, data, tmp_path / "run", "--num-rollout", str(N_STEPS), "--partial-rollout")
    words += ["--over-sampling-batch-size", "5", "--agent-env", "MAX_TOKENS=12", "SPREAD=4"]
    words += ["--rollout-max-response-len", "64", "--rollout-max-context-len", "600"]
    words += ["--rollout-backend", "sglang", "--sglang-server", url, "--agentic-session-lifecycle"]
    words += ["--save-debug-rollout-data", str(tmp_path / "run" / "samples-{rollout_id}.jsonl")]
    return [*words, *more]


def pauses_told(log):
    """What the server was told, in order: modes of pauses, and "continue"."""
    told = re.findall(
        r"^(?:pause_generation .*\"mode\": ?\"(\w+)\"|(continue)_generation)", log.read_text(), re.MULTILINE
    )
    return [mode or went_on for mode, went_on in told]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_attempts_go_on_under_the_weights_of_the_next_step(checkpoint, tmp_path, mode):
    """One pause a step but the last, each continued once; turns span versions; nobody is aborted or lost."""
    log, out = tmp_path / "server.log", tmp_path / "run"
    with somebodys_server(checkpoint, log) as url:
        stale = ["--allow-stale-kv"] if mode == "in_place" else []
        words = paused_run(checkpoint, tmp_path, url, "--partial-rollout-pause", mode, *stale)
        with running(words, temp=tmp_path / "tmp", log=tmp_path / "console.log") as process:
            assert process.wait(120) == 0, (tmp_path / "console.log").read_text()[-3000:]
    assert pauses_told(log) == [mode, "continue"] * (N_STEPS - 1)
    metrics = metrics_of(out)
    assert sum(step["rollout/n_aborted_attempts"] for step in metrics) > 0
    assert sum(step["agentic_kv/session/close_failure"] for step in metrics) == 0
    sessions = [session for dump in dumps(out) for session in dump.sessions]
    assert sum(session.abort_count for session in sessions) == sum(s["rollout/n_aborted_attempts"] for s in metrics)
    assert all(len(request["attempts"]) == 1 for session in sessions for request in session.requests)
    assert max(len({span.version for span in session.weight_versions}) for session in sessions) > 1
    assert "abort_timeout" not in (out / "run.log").read_text()


def test_a_run_that_is_stopped_in_a_pause_leaves_nobodys_server_paused(checkpoint, tmp_path):
    log, console = tmp_path / "server.log", tmp_path / "console.log"
    with somebodys_server(checkpoint, log) as url:
        words = paused_run(checkpoint, tmp_path, url, "--partial-rollout-pause", "retract")
        with running(words, temp=tmp_path / "tmp", log=console) as process:
            wait_until(lambda: "retract" in pauses_told(log), within_s=60, log=console)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130, console.read_text()[-3000:]
        assert pauses_told(log)[-1] == "continue"
    assert "cleanup.timed_out" not in (tmp_path / "run" / "run.log").read_text()


def test_a_pause_that_the_engine_cannot_do_is_refused_before_anything_is_started(checkpoint, tmp_path):
    words = paused_run(checkpoint, tmp_path, "http://127.0.0.1:9", "--partial-rollout-pause", "in_place")
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 64
    assert "--partial-rollout-pause in_place needs --allow-stale-kv" in done.stderr
