"""A save killed at any file-system step leaves a complete checkpoint and is cleared away by the next save."""

from __future__ import annotations

import json
import shutil

import pytest
from builders_disk import DyingDisk, FastDisk, KilledError
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.errors import ConfigError, TrainError
from relax_trio.train.checkpoint import find_latest, load_state, prune, step_name, verify, write_checkpoint


def payload_of(step, disk=None):
    """A payload of two files; on a dying disk each of them is a step of its own."""

    def payload(path):
        for name in ("model.bin", "sub/tokenizer.txt"):
            (path / name).parent.mkdir(exist_ok=True)
            (disk or FastDisk()).write_text(path / name, f"{name} of {step}, with something in it")

    return payload


def save(directory, step, disk=None, *, round_=0):
    state = {"rollout_id": step - 1, "round": round_}
    return write_checkpoint(directory, step, payload_of(step, disk), state, disk or FastDisk())


def assert_complete(path, steps):
    step = load_state(path)["rollout_id"] + 1
    assert step in steps
    verify(path)
    assert (path / "model.bin").read_text().startswith(f"model.bin of {step}")


def n_disk_steps(directory, step):
    disk = DyingDisk(10_000, "before")
    save(directory, step, disk)
    return 10_000 - disk.left


@pytest.fixture(scope="module")
def longest(tmp_path_factory):
    """Disk steps of the longest save there is: one that replaces and has leftovers to clear."""
    directory = tmp_path_factory.mktemp("count")
    save(directory, 1)
    (directory / ".step_000007.tmp").mkdir()
    n = n_disk_steps(directory, 1)
    assert n > 15
    return n


KILLS = st.tuples(st.integers(0, 30), st.sampled_from(["before", "half", "after"]), st.booleans())


@settings(max_examples=80, deadline=None)
@given(st.lists(KILLS, min_size=1, max_size=4))
def test_a_save_killed_at_any_point_leaves_the_previous_or_the_new_checkpoint(tmp_path_factory, kills):
    directory = tmp_path_factory.mktemp("kills")
    save(directory, 1)
    step = 1  # of the newest checkpoint that a save returned for
    for round_, (fatal, how, again) in enumerate(kills, start=1):
        target = step if again else step + 1
        disk = DyingDisk(fatal, how)
        try:
            save(directory, target, disk, round_=round_)
        except KilledError:
            pass
        else:
            step = target
            assert find_latest(directory) == directory / step_name(target)
        found = find_latest(directory)
        assert found is not None
        assert_complete(found, {step, target})
        if not disk.dead:
            assert load_state(found)["round"] == round_
        step = load_state(found)["rollout_id"] + 1
    path = save(directory, step + 1)
    assert find_latest(directory) == path
    assert_complete(path, {step + 1})
    assert [p.name for p in directory.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("how", ["before", "half", "after"])
@pytest.mark.parametrize("replaces", [False, True])
def test_every_single_step_of_a_save_may_be_the_last(tmp_path, longest, how, replaces):
    target = 1 if replaces else 2
    for fatal in range(longest + 1):
        directory = tmp_path / str(fatal)
        save(directory, 1)
        disk = DyingDisk(fatal, how)
        try:
            save(directory, target, disk)
        except KilledError:
            pass
        found = find_latest(directory)
        assert found is not None
        assert_complete(found, {1, target})
        path = save(directory, target)
        assert find_latest(directory) == path == directory / step_name(target)
        assert_complete(path, {target})
        assert [p.name for p in directory.iterdir() if p.name.startswith(".")] == []
    assert not disk.dead, "the last round runs through"


@pytest.mark.parametrize("how", ["before", "half", "after"])
def test_a_first_save_that_is_killed_leaves_nothing_or_all(tmp_path, longest, how):
    for fatal in range(longest):
        directory = tmp_path / str(fatal)
        disk = DyingDisk(fatal, how)
        try:
            save(directory, 1, disk)
        except KilledError:
            pass
        found = find_latest(directory)
        if found is not None:
            assert_complete(found, {1})


def test_latest_names_the_newest_save_even_if_an_older_run_got_further(tmp_path):
    save(tmp_path, 5)
    path = save(tmp_path, 3)
    assert (tmp_path / "latest").read_text() == "step_000003\n"
    assert find_latest(tmp_path) == path


def test_a_checkpoint_may_be_named_itself(tmp_path):
    path = save(tmp_path, 3)
    save(tmp_path, 4)
    assert find_latest(path) == path


def test_no_checkpoint_is_none(tmp_path):
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "missing") is None


@pytest.mark.parametrize("content", ["cut", "longer than it was written" * 100])
def test_a_damaged_checkpoint_is_passed_over_and_told(tmp_path, events, content):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    (second / "model.bin").write_text(content)
    assert find_latest(tmp_path) == first
    assert [(e.name, e.fields["path"]) for e in events] == [("checkpoint.skipped", str(second))]
    assert f"model.bin has {len(content)} bytes instead of" in events[0].fields["reason"]


DAMAGES = {
    "model.bin is missing": lambda p: (p / "model.bin").unlink(),
    "sub/tokenizer.txt has 2 bytes": lambda p: (p / "sub/tokenizer.txt").write_text("no"),
    "manifest.json is damaged": lambda p: (p / "manifest.json").write_text("{"),
    "manifest.json cannot be read": lambda p: (p / "manifest.json").unlink(),
    "manifest.json is not of format": lambda p: (p / "manifest.json").write_text(json.dumps({"format": 99})),
    "state.json is missing": lambda p: (p / "state.json").unlink(),
    "state.json is damaged": lambda p: (p / "state.json").write_text(
        (p / "state.json").read_text().replace("{", "[", 1)
    ),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_loading_a_damaged_checkpoint_names_the_file(tmp_path, message):
    path = save(tmp_path, 1)
    DAMAGES[message](path)
    with pytest.raises(ConfigError, match=message):
        load_state(path)


def test_only_damaged_checkpoints_are_an_error_not_a_fresh_start(tmp_path):
    path = save(tmp_path, 1)
    (path / "model.bin").unlink()
    with pytest.raises(ConfigError, match=r"no complete checkpoint in .*model.bin is missing"):
        find_latest(tmp_path)


def test_a_full_disk_is_a_train_error_and_leaves_the_old_checkpoint_alone(tmp_path):
    path = save(tmp_path, 1)

    def full(directory):
        (directory / "model.bin").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(TrainError, match=r"step_000002 could not be written: OSError: .*No space left"):
        write_checkpoint(tmp_path, 2, full, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000001"]
    assert find_latest(tmp_path) == path


def test_state_that_is_no_json_is_refused_before_anything_is_replaced(tmp_path):
    path = save(tmp_path, 1)
    with pytest.raises(TrainError, match="step_000001"):
        write_checkpoint(tmp_path, 1, payload_of(1), {"loss": float("nan")})
    assert load_state(path) == {"rollout_id": 0, "round": 0}


def test_a_checkpoint_can_be_copied_elsewhere(tmp_path):
    path = save(tmp_path / "a", 1)
    shutil.copytree(path, tmp_path / "b" / path.name)
    assert find_latest(tmp_path / "b") == tmp_path / "b" / path.name


@pytest.mark.parametrize("how", ["before", "half", "after"])
@pytest.mark.parametrize("n", range(7))
def test_removing_old_checkpoints_may_be_killed_at_any_point(tmp_path, n, how):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    disk = DyingDisk(n, how)
    try:
        prune(tmp_path, 2, disk)
    except KilledError:
        pass
    assert_complete(find_latest(tmp_path), {4})
    for path in tmp_path.glob("step_*"):
        verify(path)
    save(tmp_path, 5)
    prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000004", "step_000005"]


def test_the_latest_is_kept_even_if_others_have_higher_numbers(tmp_path):
    for step in (5, 6, 7, 2):
        save(tmp_path, step)
    prune(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000002"]
    prune(tmp_path, 3)
    assert_complete(find_latest(tmp_path), {2})
