"""`relax-trio replay`: a run's own step comes out as recorded, and a change in it is named by Session and token."""

from __future__ import annotations

import json
import shutil

import pytest
from builders_checkpoint import save_tiny_checkpoint
from builders_commands import command, run, write_rows

from relax_trio.cli.main import main

pytestmark = [pytest.mark.process, pytest.mark.engine]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The run directory of two steps, with dumps and a checkpoint a step."""
    home = tmp_path_factory.mktemp("replay")
    out = home / "run"
    words = command("train", save_tiny_checkpoint(home / "tiny"), write_rows(home / "d.jsonl", 4), out)
    words += ["--num-rollout", "2", "--save-interval", "1", "--lr", "0.01", "--global-batch-size", "2"]
    words += ["--save-debug-rollout-data", str(out / "rollout" / "{rollout_id}.jsonl")]
    done = run(words)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def copied(recorded, tmp_path):
    """A copy whose dumps may be changed."""
    out = shutil.copytree(recorded, tmp_path / "run")
    config = out / "config.yaml"
    config.write_text(config.read_text().replace(str(recorded), str(out)))
    return out


def replayed(capsys, out, step):
    code = main(["replay", str(out), "--rollout", str(step)])
    return code, capsys.readouterr().out


def change(out, step, edit):
    """Edit the sample lines of a dump; returns the place of the first one that was changed."""
    path = out / "rollout" / f"{step}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    places = [record["place"] for record in records if record["kind"] == "sample" and edit(record)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return places[0]


@pytest.mark.parametrize("step", [0, 1])
def test_a_recorded_step_comes_out_as_recorded(recorded, capsys, step):
    code, text = replayed(capsys, recorded, step)
    assert code == 0, text
    assert [line.split()[0] for line in text.splitlines()] == ["reward", "credit", "packing", "logprobs", "loss"]
    assert "not compared" not in text


def test_a_changed_credit_is_named_by_session_and_context(copied, capsys):
    def edit(record):
        record["advantage"] += 0.5
        return True

    place = change(copied, 0, edit)
    code, text = replayed(capsys, copied, 0)
    assert code == 1
    assert text.splitlines()[-1].startswith(f"first difference in credit: session {place}, context (implicit): credit")
    assert "logprobs" not in text


def test_a_changed_logprob_is_named_by_its_token(copied, capsys):
    seen = []

    def edit(record):
        t = next((t for t, trained in reversed(list(enumerate(record["loss_mask"]))) if trained), None)
        if t is None or seen:
            return False
        seen.append(t)
        record["rollout_log_probs"][t] -= 0.5
        return True

    place = change(copied, 1, edit)
    code, text = replayed(capsys, copied, 1)
    assert code == 1
    named = f"first difference in logprobs: session {place}, context (implicit), token {seen[0]} of the response: "
    assert text.splitlines()[-1].startswith(named)


def test_a_changed_reward_is_a_difference_of_the_first_stage(copied, capsys):
    def edit(record):
        record["reward"] = 7.0
        return True

    change(copied, 0, edit)
    code, text = replayed(capsys, copied, 0)
    assert code == 1
    assert text.splitlines()[-1].startswith("first difference in reward: rollout/")


def test_without_the_steps_checkpoint_all_but_the_model_is_compared(copied, capsys):
    shutil.rmtree(copied / "checkpoints" / "step_000001")
    code, text = replayed(capsys, copied, 1)
    assert code == 0
    assert [line for line in text.splitlines() if "not compared" in line] == text.splitlines()[-2:]


@pytest.mark.parametrize("words", [["replay"], ["replay", "nowhere"], ["replay", "--rollout", "1"]])
def test_what_is_no_run_directory_is_refused(words, capsys):
    assert main(words) == 64
    assert "run directory" in capsys.readouterr().err
