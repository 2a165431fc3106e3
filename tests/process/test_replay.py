"""`relax-trio replay`: a run's own step comes out as recorded, and a change in it is named by Session and token."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from builders_checkpoint import save_tiny_checkpoint
from builders_commands import command, run, write_rows

from relax_trio.cli.main import main

pytestmark = [pytest.mark.process, pytest.mark.engine]

DOCS = Path(__file__).parents[2] / "docs"
OWN = ("rollout", "train", "perf", "agentic_kv")
"""What metrics that aren't fields of the user's begin with."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The run directory of two steps, with dumps and a checkpoint a step."""
    home = tmp_path_factory.mktemp("replay")
    out = home / "run"
    words = command("train", save_tiny_checkpoint(home / "tiny"), write_rows(home / "d.jsonl", 4), out)
    words += ["--num-rollout", "2", "--save-interval", "1", "--lr", "0.01", "--global-batch-size", "2"]
    words += ["--agent-env", "TURNS=2"]
    words += ["--save-debug-rollout-data", str(out / "rollout" / "{rollout_id}.jsonl")]
    done = run(words)
    assert done.returncode == 0, done.stderr
    return out


def explained_metrics():
    """Patterns of the metric names in the documentation: `a/*` is any that begins so, `a/b|c` are two."""
    text = "".join((DOCS / page).read_text() for page in ("training.md", "algorithms.md", "sglang.md"))
    named = re.findall(r"`((?:rollout|train|perf|agentic_kv)/[^` ]+)`", text)
    for name in named:
        head, _, last = name.rpartition("/")
        for choice in last.replace("\\|", "|").split("|"):
            yield re.compile(re.escape(f"{head}/{choice}").replace(r"\*", ".*"))


def test_every_number_of_a_step_is_in_the_documentation(recorded):
    patterns = list(explained_metrics())
    lines = (recorded / "metrics.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line) if name.split("/")[0] in OWN}
    assert {name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)} == set()
    assert "train/loss" in names


def test_an_adapter_and_a_rate_that_decays_over_an_epoch_come_out_as_recorded(tmp_path, capsys):
    """The adapter begins with random numbers, and the decay's length is the dataset's to say."""
    pytest.importorskip("peft")
    out = tmp_path / "run"
    words = command("train", save_tiny_checkpoint(tmp_path / "tiny"), write_rows(tmp_path / "d.jsonl", 4), out)
    words += ["--lora-rank", "2", "--lr", "0.1", "--lr-decay-style", "cosine", "--rollout-batch-size", "4"]
    words += ["--save-debug-rollout-data", str(out / "rollout" / "{rollout_id}.jsonl")]
    done = run(words)
    assert done.returncode == 0, done.stderr
    code, text = replayed(capsys, out, 0)
    assert code == 0, text
    assert "not compared" not in text


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


def first_trained(record):
    return record["loss_mask"].index(1)


def changed_reward(record):
    record["reward"] = 7.0
    return ", context (implicit): reward "


def removed_reward(record):
    record["reward"] = None
    return ", context (implicit): reward "


def changed_reward_object(record):
    record["reward"] = {"other": 1.0}
    return ": its reward is an object; name its primary reward by --reward-key"


def changed_status(record):
    was_truncated = record["status"] == "truncated"
    record["status"] = "completed" if was_truncated else "truncated"
    return f", context (implicit): is_truncated {int(was_truncated)} recorded, {int(not was_truncated)} found"


def changed_turn(record):
    record["turn_lens"][0] += 1
    return ", context (implicit): generated_len "


def changed_metadata(record):
    record["output_metadata"]["more"] = 2
    return ", context (implicit): metadata/more none recorded, 2 found"


def changed_session(record):
    record["index"] += 1
    return ", context (implicit): index "


def changed_version(record):
    record["weight_versions"][0]["version"] = "7"
    return ": its weight versions are not those that were recorded"


def changed_name(record):
    record["name"] = "main"
    return ": contexts (implicit) recorded, main found"


def changed_place(record):
    record["place"] = "G77/0"
    return ": contexts (implicit) recorded, none found"


@pytest.mark.parametrize(
    "edit",
    [
        changed_reward,
        removed_reward,
        changed_reward_object,
        changed_status,
        changed_turn,
        changed_metadata,
        changed_session,
        changed_version,
        changed_name,
        changed_place,
    ],
)
def test_a_row_that_metrics_were_not_made_of_is_named_in_the_first_stage(copied, capsys, edit):
    assert_named(copied, capsys, edit, "reward")


def masked_token(record):
    record["loss_mask"][first_trained(record)] = 0
    return ", context (implicit), token 0 of the response: its loss mask is 0, unlike that of most tokens of its turn 0"


def masked_turn(record):
    start, n = record["turn_starts"][0], record["turn_lens"][0]
    record["loss_mask"][start : start + n] = [0] * n
    record["rollout_log_probs"][start : start + n] = [0.0] * n
    n_trained = sum(record["loss_mask"])
    return f", context (implicit): {n_trained + n} trained tokens recorded, {n_trained} found"


def trained_observation(record):
    t = record["loss_mask"].index(0)
    record["loss_mask"][t] = 1
    return f", context (implicit), token {t} of the response: is trained, but no turn generated it"


def moved_turn(record):
    record["turn_starts"][0] += 1
    return ", context (implicit), token 0 of the response: is trained, but no turn generated it"


def turn_outside(record):
    record["turn_starts"][-1] = record["response_length"]
    return f", context (implicit), token {record['response_length']} of the response: its turn "


def impossible_logprob(record):
    t = first_trained(record)
    record["rollout_log_probs"][t] = 0.5
    return f", context (implicit), token {t} of the response: 0.5 is no logprob"


@pytest.mark.parametrize(
    "edit", [masked_token, masked_turn, trained_observation, moved_turn, turn_outside, impossible_logprob]
)
def test_a_row_that_cannot_be_as_it_was_generated_is_named_by_its_token(copied, capsys, edit):
    assert_named(copied, capsys, edit, "packing")


def removed_credit(record):
    record["advantage"] = None
    return ", context (implicit): no credit recorded"


def test_a_credit_that_is_missing_is_named(copied, capsys):
    assert_named(copied, capsys, removed_credit, "credit")


def foreign_token(record):
    record["tokens"][0] = 10**6
    return ", context (implicit), token 0 of the row: id 1000000, but the model has "


def test_a_token_that_the_model_does_not_have_is_named(copied, capsys):
    assert_named(copied, capsys, foreign_token, "logprobs")


def assert_named(out, capsys, edit, stage):
    """Replay names the Session of the one row that was edited, and what `edit` returned."""
    told = []

    def edit_one(record):
        if told or len(record["turn_lens"]) < 2:
            return False
        told.append(f"first difference in {stage}: session {record['place']}")
        told.append(edit(record))
        return True

    change(out, 0, edit_one)
    code, text = replayed(capsys, out, 0)
    assert code == 1
    assert text.splitlines()[-1].startswith("".join(told))


@pytest.mark.parametrize("name", ["train/loss", "train/grad_norm", "train/entropy"])
def test_a_number_of_the_optimizer_phase_that_differs_is_named(copied, capsys, name):
    path = copied / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[1][name] += 0.01 * abs(records[1][name]) + 1e-3
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert replayed(capsys, copied, 0)[0] == 0
    code, text = replayed(capsys, copied, 1)
    assert code == 1
    assert text.splitlines()[-1].startswith(f"first difference in loss: {name}: ")


def test_a_row_that_is_missing_is_named(copied, capsys):
    path = copied / "rollout" / "0.jsonl"
    *kept, last = path.read_text().splitlines()
    path.write_text("".join(line + "\n" for line in kept))
    code, text = replayed(capsys, copied, 0)
    assert code == 1
    named = f"session {json.loads(last)['place']}: contexts (implicit) recorded, none found"
    assert text.splitlines()[-1] == f"first difference in reward: {named}"


def test_a_dump_that_does_not_tell_of_contexts_is_compared_by_the_steps_metrics(copied, capsys):
    path = copied / "rollout" / "0.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record.pop("contexts", None)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert replayed(capsys, copied, 0)[0] == 0
    change(copied, 0, lambda record: record.update(reward=7.0) or True)
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
