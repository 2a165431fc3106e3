"""Metrics of a step, and the file they are kept in."""

from __future__ import annotations

import json
import math

import pytest

from relax_trio.errors import ConfigError
from relax_trio.observe.metrics import MetricsWriter, read_metrics, rollout_metrics
from relax_trio.testing.sample import make_sample


def test_a_step_by_hand():
    samples = [
        make_sample(group=0, place=0, reward=1.0, turn_lens=(4,)),
        make_sample(group=0, place=1, reward=0.0, turn_lens=(2, 3, 1), status="truncated"),
        make_sample(group=1, place=0, reward=1.0, turn_lens=(1, 1)),
        make_sample(group=1, place=1, reward=1.0, turn_lens=(5,)),
    ]

    assert rollout_metrics(samples, reward_key=None) == {
        "rollout/raw_reward": 0.75,
        "rollout/raw_reward/std": math.sqrt(3) / 4,
        "rollout/raw_reward/min": 0.0,
        "rollout/raw_reward/max": 1.0,
        "rollout/zero_std_groups": 1,
        "rollout/n_sessions": 4,
        "rollout/n_groups": 2,
        "rollout/n_samples": 4,
        "rollout/response_len/mean": (4 + 8 + 3 + 5) / 4,
        "rollout/response_len/max": 8,
        "rollout/generated_len/mean": (4 + 6 + 2 + 5) / 4,
        "rollout/generated_len/max": 6,
        "rollout/total_len/max": 11,
        "rollout/turns/mean": 7 / 4,
        "rollout/turns/max": 3,
        "rollout/truncated_ratio": 0.25,
    }


def test_the_raw_reward_counts_logical_sessions_not_rows():
    samples = [
        make_sample(place=0, name="main", reward=1.0),
        make_sample(place=0, name="searcher"),
        make_sample(place=0, name="writer"),
        make_sample(place=1, name="main", reward=0.0),
    ]

    metrics = rollout_metrics(samples, reward_key=None)

    assert metrics["rollout/raw_reward"] == 0.5
    assert metrics["rollout/n_sessions"] == 2
    assert metrics["rollout/n_samples"] == 4


def test_without_any_reward_there_is_no_raw_reward():
    assert "rollout/raw_reward" not in rollout_metrics([make_sample()], reward_key=None)


def test_helper_fields_of_rewards_and_numbers_of_metadata_get_four_statistics():
    samples = [
        make_sample(place=place, reward={"score": 1.0, "fmt": fmt, "pred": "x"}, metadata=metadata)
        for place, (fmt, metadata) in enumerate(
            [(1, {"n_calls": 3, "ok": True}), (2, {"n_calls": 5, "text": "no"}), (6, {})]
        )
    ]

    metrics = rollout_metrics(samples, reward_key="score")

    assert {name: value for name, value in metrics.items() if "fmt" in name} == {
        "rollout/fmt/mean": 3.0,
        "rollout/fmt/median": 2.0,
        "rollout/fmt/max": 6.0,
        "rollout/fmt/min": 1.0,
    }
    assert {name: value for name, value in metrics.items() if "n_calls" in name} == {
        "n_calls/mean": 4.0,
        "n_calls/median": 4.0,
        "n_calls/max": 5.0,
        "n_calls/min": 3.0,
    }
    assert not [name for name in metrics if "score" in name or "ok" in name or "text" in name or "pred" in name]


def test_a_field_with_a_taken_name_never_replaces_a_metric(events):
    samples = [make_sample(reward={"score": 1.0, "turns": 99.0}, metadata={"rollout/response_len": 99})]

    metrics = rollout_metrics(samples, reward_key="score")

    assert metrics["rollout/turns/mean"] == 1
    assert metrics["rollout/response_len/mean"] == 4
    assert [(event.name, event.fields["field"]) for event in events] == [
        ("metrics.shadowed", "rollout/turns"),
        ("metrics.shadowed", "rollout/response_len"),
    ]


def test_no_rows_give_counts_only():
    assert set(rollout_metrics([], reward_key=None).values()) == {0}


def test_steps_are_appended_as_one_object_per_line(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(0, {"rollout/raw_reward": 0.5, "train/loss": -1, "perf/rollout_time": None})
    writer.write(1, {"rollout/raw_reward": 0.75})

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()

    assert [json.loads(line) for line in lines] == [
        {"rollout_id": 0, "rollout/raw_reward": 0.5, "train/loss": -1, "perf/rollout_time": None},
        {"rollout_id": 1, "rollout/raw_reward": 0.75},
    ]
    assert read_metrics(tmp_path) == [json.loads(line) for line in lines]


def test_numbers_that_are_not_finite_become_null_and_are_told(tmp_path, events):
    MetricsWriter(tmp_path).write(3, {"train/loss": math.nan, "train/grad_norm": math.inf, "x": 1.0})

    assert read_metrics(tmp_path) == [{"rollout_id": 3, "train/loss": None, "train/grad_norm": None, "x": 1.0}]
    assert [event.fields for event in events] == [
        {"rollout": 3, "metric": "train/loss", "value": "nan"},
        {"rollout": 3, "metric": "train/grad_norm", "value": "inf"},
    ]


def test_a_resumed_run_drops_the_steps_it_does_again_and_a_torn_line(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.rewind(0)
    for step in range(4):
        writer.write(step, {"x": step})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"rollout_id": 4, "x"')

    assert [record["rollout_id"] for record in read_metrics(tmp_path)] == [0, 1, 2, 3]
    writer.rewind(2)
    writer.write(2, {"x": 20})

    assert read_metrics(tmp_path) == [
        {"rollout_id": 0, "x": 0},
        {"rollout_id": 1, "x": 1},
        {"rollout_id": 2, "x": 20},
    ]
    assert len(path.read_text().splitlines()) == 3


def test_a_step_written_twice_is_read_once(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"x": 1})
    writer.write(0, {"x": 0})
    writer.write(1, {"x": 2})

    assert read_metrics(tmp_path) == [{"rollout_id": 0, "x": 0}, {"rollout_id": 1, "x": 2}]


@pytest.mark.parametrize("line", ["{", "[]", '{"x": 1}', '{"rollout_id": true}', '{"rollout_id": 0, "x": NaN}'])
def test_a_broken_line_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"rollout_id": 0}}\n{line}\n')

    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path)


def test_a_run_without_metrics_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_metrics(tmp_path)
