"""`relax-trio` commands as real processes: what a kill, a Ctrl-C or a failure leaves; where a resume goes on."""

from __future__ import annotations

import json
import os
import signal

import pytest
from builders_checkpoint import save_tiny_checkpoint
from builders_commands import command, run, running, wait_until, write_rows
from builders_process import alive, new_tag, status_of

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def metrics(out):
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def alive_parent(pid):
    return int(status_of(pid).get("PPid", 0))


def hanging(tag, hang_from):
    return ["--agent-env", f"TEST_TAG={tag}", f"HANG_FROM={hang_from}"]


def test_killing_the_engine_ends_every_agent_and_its_children(checkpoint, tmp_path):
    """32 agents, each with a child that left its session and one that ignores SIGTERM."""
    tag, data, log = new_tag(), write_rows(tmp_path / "d.jsonl", 16), tmp_path / "log"
    words = command("train", checkpoint, data, tmp_path / "run", *hanging(tag, 0), tag=tag)
    words += ["--rollout-batch-size", "8", "--n-samples-per-prompt", "4"]
    with running(words, temp=tmp_path / "tmp", log=log) as process:
        wait_until(lambda: len(alive(f"{tag}-child")) == 32, within_s=90, log=log)
        wait_until(lambda: len(alive(f"{tag}-deaf")) == 32, within_s=30, log=log)
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: not alive(tag), within_s=10, log=log)


def test_ctrl_c_leaves_nothing_and_load_goes_on_from_the_last_complete_step(checkpoint, tmp_path):
    tag, data, log = new_tag(), write_rows(tmp_path / "d.jsonl", 8), tmp_path / "log"
    out, temp = tmp_path / "run", tmp_path / "tmp"
    dumps = ["--save-debug-rollout-data", str(tmp_path / "dump-{rollout_id}.jsonl")]
    words = command("train", checkpoint, data, out, *hanging(tag, 4), *dumps, "--num-rollout", "4", tag=tag)
    with running(words, temp=temp, log=log) as process:
        wait_until(lambda: len(metrics(out)) == 2 and len(alive(f"{tag}-child")) == 4, within_s=90, log=log)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    assert not alive(tag)
    assert not list(temp.iterdir())
    assert (out / "checkpoints" / "step_000002" / "model.safetensors").is_file()

    rest = run(
        command("train", checkpoint, data, out, *dumps, "--num-rollout", "4", "--load", str(out / "checkpoints"))
    )

    assert rest.returncode == 0, rest.stderr
    assert [step["rollout_id"] for step in metrics(out)] == [0, 1, 2, 3]
    rows = [
        sorted(
            {
                json.loads(line)["row"]
                for line in (tmp_path / f"dump-{i}.jsonl").read_text().splitlines()
                if '"row"' in line
            }
        )
        for i in range(4)
    ]
    assert rows == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert (out / "checkpoints" / "step_000004").is_dir()


def test_a_run_in_which_every_group_fails_ends_and_shows_the_agents_log(checkpoint, tmp_path):
    data = write_rows(tmp_path / "d.jsonl", 8)
    done = run(command("rollout", checkpoint, data, tmp_path / "run", "--agent-env", "FAIL=1"))

    assert done.returncode == 1
    assert "Groups in a row failed" in done.stderr
    assert "the agent's own bug" in done.stderr
    assert "Traceback (most recent call last)" not in done.stderr


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--hf-checkpoint", "/no/such/model"], "/no/such/model"),
        (["--prompt-data", "/no/such/rows.jsonl"], "/no/such/rows.jsonl"),
        (["--agent-cwd", "/no/such/dir"], "/no/such/dir"),
        (["--agent-command", "no-such-program-here --flag"], "no-such-program-here"),
        (["--over-sampling-batch-size", "1"], "--over-sampling-batch-size"),
        (["--n-sample-per-prompt", "2"], "--n-samples-per-prompt"),
    ],
    ids=["checkpoint", "dataset", "cwd", "command", "sizes", "flag"],
)
def test_bad_input_is_refused_before_anything_is_started(checkpoint, tmp_path, change, says):
    data = write_rows(tmp_path / "d.jsonl", 4)
    done = run([*command("train", checkpoint, data, tmp_path / "run"), *change])

    assert done.returncode == 64
    assert says in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_bad_row_is_named_by_file_and_line(checkpoint, tmp_path):
    data = write_rows(tmp_path / "d.jsonl", 2)
    data.write_text(data.read_text() + '{"input": 3}\n')
    done = run(command("train", checkpoint, data, tmp_path / "run"))

    assert done.returncode == 64
    assert "d.jsonl:3" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_second_ctrl_c_does_not_wait_for_the_grace(checkpoint, tmp_path):
    tag, data, log = new_tag(), write_rows(tmp_path / "d.jsonl", 8), tmp_path / "log"
    words = command("rollout", checkpoint, data, tmp_path / "run", *hanging(tag, 0), tag=tag)
    with running([*words, "--agent-term-grace", "15"], temp=tmp_path / "tmp", log=log) as process:
        wait_until(lambda: len(alive(f"{tag}-deaf")) == 4, within_s=90, log=log)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "run.stopping" in log.read_text(), within_s=10, log=log)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
        wait_until(lambda: not alive(tag), within_s=2, log=log)
    assert not list((tmp_path / "tmp").iterdir())


def test_sigterm_while_starting_ends_at_once(checkpoint, tmp_path):
    data, log, temp = write_rows(tmp_path / "d.jsonl", 8), tmp_path / "log", tmp_path / "tmp"
    words = command("rollout", checkpoint, data, tmp_path / "run")
    with running(words, temp=temp, log=log) as process:
        wait_until((tmp_path / "run" / "config.yaml").exists, within_s=60, log=log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) in (143, -signal.SIGTERM)
    assert not list(temp.iterdir())


def test_a_dead_service_costs_no_trained_step(checkpoint, tmp_path):
    """SIGKILL of the warden: the run fails, its agents are gone, and the last complete step is saved."""
    tag, data, log, out = new_tag(), write_rows(tmp_path / "d.jsonl", 8), tmp_path / "log", tmp_path / "run"
    words = command("train", checkpoint, data, out, *hanging(tag, 4), tag=tag)
    with running(words, temp=tmp_path / "tmp", log=log) as process:
        wait_until(lambda: len(metrics(out)) == 2 and len(alive(f"{tag}-child")) == 4, within_s=90, log=log)
        (warden,) = [pid for pid in alive("warden/__main__.py") if alive_parent(pid) == process.pid]
        os.kill(warden, signal.SIGKILL)
        assert process.wait(timeout=60) == 1
        wait_until(lambda: not alive(tag), within_s=10, log=log)
    assert "the warden" in log.read_text()
    assert (out / "checkpoints" / "step_000002" / "state.json").is_file()


def test_another_runs_directory_is_never_taken(checkpoint, tmp_path):
    data = write_rows(tmp_path / "d.jsonl", 4)
    first, second = tmp_path / "first", tmp_path / "second"
    for out in (first, second):
        done = run(command("train", checkpoint, data, out, "--num-rollout", "1"))
        assert done.returncode == 0, done.stderr
    before = (second / "metrics.jsonl").read_text()
    done = run(command("train", checkpoint, data, second, "--num-rollout", "2", "--load", str(first / "checkpoints")))

    assert done.returncode == 64
    assert "is not empty" in done.stderr
    assert (second / "metrics.jsonl").read_text() == before
