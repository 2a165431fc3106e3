"""The demo's questions, data sets and demonstrations."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_trio.demo.recipe import DemoRecipe, WarmStartRecipe
from relax_trio.demo.task import MAX_ROWS, SYSTEM_PROMPT, calculate, demonstration, draw_question, write_dataset
from relax_trio.errors import ConfigError


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@given(st.integers(0, 2**32), st.sampled_from([1, 2]), st.booleans())
def test_a_question_s_text_evaluates_to_its_answer(seed: int, n_operations: int, held_out: bool) -> None:
    question = draw_question(random.Random(seed), n_operations=n_operations, held_out=held_out)
    expression = question.text.removeprefix("What is ").removesuffix("?")
    assert eval(expression) == question.answer
    assert question.n_operations == n_operations
    assert question.held_out == held_out
    assert question.first_result >= 0
    assert 0 <= question.answer < 100_000


def test_training_and_held_out_rows_share_no_question_even_with_one_seed(tmp_path: Path) -> None:
    write_dataset(tmp_path / "train.jsonl", n_rows=MAX_ROWS, seed=1, held_out=False)
    write_dataset(tmp_path / "eval.jsonl", n_rows=500, seed=1, held_out=True)
    train = [row["messages"][1]["content"] for row in rows_of(tmp_path / "train.jsonl")]
    held = [row["messages"][1]["content"] for row in rows_of(tmp_path / "eval.jsonl")]
    assert (len(set(train)), len(set(held))) == (MAX_ROWS, 500)
    assert not set(train) & set(held)


def test_a_data_set_is_the_same_for_the_same_seed_and_differs_for_another(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_dataset(tmp_path / name, n_rows=40, seed=seed, held_out=False)
    texts = [(tmp_path / name).read_text(encoding="utf-8") for name in "abc"]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_rows_carry_messages_label_and_the_answer_for_the_agent(tmp_path: Path) -> None:
    write_dataset(tmp_path / "rows", n_rows=8, seed=0, held_out=True)
    for row in rows_of(tmp_path / "rows"):
        assert [message["role"] for message in row["messages"]] == ["system", "user"]
        assert row["messages"][0]["content"] == SYSTEM_PROMPT
        assert row["label"] == row["metadata"]["answer"]
        assert str(eval(row["messages"][1]["content"].removeprefix("What is ").removesuffix("?"))) == row["label"]


def test_every_eight_rows_in_sequence_hold_about_the_same_share_of_simple_questions(tmp_path: Path) -> None:
    write_dataset(tmp_path / "rows", n_rows=400, seed=0, held_out=False)
    simple = [row["metadata"]["n_operations"] == 1 for row in rows_of(tmp_path / "rows")]
    assert sum(simple) == round(400 * DemoRecipe().one_operation_share)
    assert {sum(simple[i : i + 8]) for i in range(0, 400, 8)} <= {2, 3}


@pytest.mark.parametrize("n_rows", [0, -1, MAX_ROWS + 1])
def test_an_impossible_number_of_rows_is_refused_and_writes_nothing(tmp_path: Path, n_rows: int) -> None:
    with pytest.raises(ConfigError, match=str(MAX_ROWS)):
        write_dataset(tmp_path / "rows", n_rows=n_rows, seed=0, held_out=False)
    assert list(tmp_path.iterdir()) == []


def test_only_the_careful_behaviour_arrives_at_the_answer_and_all_behaviours_occur() -> None:
    rng = random.Random(0)
    numbers = WarmStartRecipe()
    n_turns = {1: 0, 2: 0, 3: 0}
    for _ in range(500):
        question = draw_question(rng, n_operations=2, held_out=False)
        turns = demonstration(question, rng, numbers)
        n_turns[len(turns)] += 1
        if len(turns) < 3:
            assert turns[-1][1] != f"Answer: {question.answer}" or question.answer in (
                question.first_result,
                question.c,
            )
    assert min(n_turns.values()) > 50


def test_the_tool_refuses_an_unknown_operation() -> None:
    with pytest.raises(KeyError):
        calculate(1, "/", 2)
