"""Datasets of an evaluation: what each has of its own, how many Sessions that makes, what an executor has to offer."""

from __future__ import annotations

import json
import math

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from relax_trio.config.eval_spec import eval_specs, read_eval_words, required_slots
from relax_trio.config.tree import Config, DataConfig, EvalConfig, RolloutConfig
from relax_trio.errors import ConfigError
from relax_trio.loop.setup import load_data


def config(*words, rollout=None, **evaluation):
    return Config(
        rollout=RolloutConfig(
            **{"rollout_batch_size": 5, "n_samples_per_prompt": 4, "agentic_concurrency": 6, **(rollout or {})}
        ),
        data=DataConfig(input_key="prompt", label_key="answer"),
        eval=EvalConfig(**{"eval_prompt_data": words, "eval_interval": 1, **evaluation}),
    )


def test_a_dataset_has_what_it_says_and_what_the_flags_say_otherwise():
    words = "a a.jsonl --n-samples-per-eval-prompt=5 eval_label_key=tests b b.jsonl@[0:9] agentic_eval_concurrency=2"
    first, second = eval_specs(config(*words.split(), n_samples_per_eval_prompt=3, eval_input_key="question"))

    assert (first.name, first.path, first.input_key, first.label_key) == ("a", "a.jsonl", "question", "tests")
    assert (first.n_samples, first.concurrency, first.n_sessions) == (5, 5, 25), "C_d = ceil(24 / 5)"
    assert (second.name, second.path, second.input_key, second.label_key) == (
        "b",
        "b.jsonl@[0:9]",
        "question",
        "answer",
    )
    assert (second.n_samples, second.concurrency, second.n_sessions) == (3, 2, 6)


def test_each_dataset_is_read_by_its_own_keys(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "p", "question": "q", "answer": "a", "tests": "t"}) + "\n")
    words = f"one {path} two {path} eval_input_key=question eval_label_key=tests n_samples_per_eval_prompt=3"
    made = config(*words.split())
    data = load_data(evolve(made, data=evolve(made.data, prompt_data=str(path))))

    assert [(d.name, d.tasks[0].prompt, d.tasks[0].label, d.n_samples, d.concurrency) for d in data.evaluation] == [
        ("one", "p", "a", 1, 24),
        ("two", "q", "t", 3, 8),
    ]


@given(st.integers(1, 9), st.integers(1, 9), st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_the_derived_concurrency_is_the_least_that_holds_all_train_sessions(groups, samples, sizes):
    words = [word for i, size in enumerate(sizes) for word in (f"d{i}", "p", f"n_samples_per_eval_prompt={size}")]
    rollout = {"n_samples_per_prompt": samples, "agentic_concurrency": groups}
    specs = eval_specs(config(*words, rollout=rollout))

    for spec, size in zip(specs, sizes, strict=True):
        assert spec.concurrency == math.ceil(groups * samples / size)
        assert spec.n_sessions - size < groups * samples <= spec.n_sessions


@pytest.mark.parametrize(
    ("words", "rollout", "interval", "slots"),
    [
        ("", {}, None, 24),
        ("a p", {}, 1, 24),
        ("a p n_samples_per_eval_prompt=5", {}, 1, 25),
        ("a p n_samples_per_eval_prompt=5 b p agentic_eval_concurrency=40", {}, 1, 40),
        ("a p n_samples_per_eval_prompt=5 b p agentic_eval_concurrency=40", {}, None, 24),
        ("a p n_samples_per_eval_prompt=5 b p", {"agentic_prelaunch": True}, 1, 24 + 25),
        ("a p n_samples_per_eval_prompt=5 b p", {"partial_rollout": True}, 1, 24 + 25),
        ("a p n_samples_per_eval_prompt=5 b p", {"fully_async": True}, 1, 24 + 25),
    ],
)
def test_an_executor_needs_the_slots_of_the_peak(words, rollout, interval, slots):
    assert required_slots(config(*words.split(), rollout=rollout, eval_interval=interval)) == slots


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("a", "takes pairs NAME PATH, but holds 1 words: a"),
        ("a p b", "takes pairs NAME PATH, but holds 3 words: a p b"),
        ("eval_input_key=x a p", "eval_input_key=x stands in front of the first NAME PATH"),
        ("a p color=red", "a dataset may have eval_input_key, eval_label_key, n_samples_per_eval_prompt, agentic_eval"),
        ("a p n_samples_per_eval_prompt=0", "n_samples_per_eval_prompt=0: must be a number greater than 0"),
        ("a p agentic_eval_concurrency=two", "agentic_eval_concurrency=two: must be a number greater than 0"),
        ("a p eval_label_key=", "eval_label_key= has no value"),
    ],
)
def test_wrong_words_are_refused_by_name(words, problem):
    with pytest.raises(ConfigError) as caught:
        read_eval_words(words.split())

    assert problem in str(caught.value)
