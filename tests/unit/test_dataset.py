"""Datasets: formats, slices, prompts, and bad rows named by their place."""

from __future__ import annotations

import datetime
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_trio.data.dataset import load_dataset
from relax_trio.data.messages import Message
from relax_trio.errors import ConfigError


def write_lines(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def write_table(path, rows, **options):
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def inputs(dataset):
    return [task.prompt for task in dataset.rows]


@pytest.fixture(params=["jsonl", "parquet"])
def make_dataset(request, tmp_path):
    """Write rows in one of the formats; returns the path as a text."""

    def make(rows):
        if request.param == "jsonl":
            return str(write_lines(tmp_path / "d.jsonl", rows))
        return str(write_table(tmp_path / "d.parquet", rows))

    return make


def test_a_string_prompt_is_one_user_message(make_dataset):
    path = make_dataset([{"input": "What is 1 + 1?", "answer": "2", "metadata": {"level": 3}}])
    (task,) = load_dataset(path, label_key="answer").rows
    assert task.prompt == "What is 1 + 1?"
    assert task.messages == (Message(role="user", content="What is 1 + 1?"),)
    assert (task.row, task.source, task.label, task.metadata) == (0, f"{path}:1", "2", {"level": 3})


def test_a_message_list_is_kept_and_normalized(make_dataset):
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (task,) = load_dataset(make_dataset([{"chat": plain}]), input_key="chat").rows
    assert task.messages == (Message(role="system", content="Be brief."), Message(role="user", content="Hi"))
    assert task.prompt == plain


def test_a_list_prompt_of_json_lines_is_normalized_as_requests_are(tmp_path):
    prompt = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    (task,) = load_dataset(str(write_lines(tmp_path / "d.jsonl", [{"input": prompt}]))).rows
    assert task.messages == (Message(role="system", content="Be brief."), Message(role="user", content="Hi"))
    assert task.prompt == prompt


def test_a_parquet_struct_field_that_the_row_lacks_is_absent(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    prompt = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "ok", "tool_call_id": "c1"},
        {"role": "user", "content": "And?"},
    ]
    lines = load_dataset(str(write_lines(tmp_path / "d.jsonl", [{"input": prompt}])))
    table = load_dataset(str(write_table(tmp_path / "d.parquet", [{"input": prompt}])))
    assert table.rows[0].messages == lines.rows[0].messages
    assert table.rows[0].prompt == prompt


def test_a_row_may_hold_metadata_only(make_dataset):
    dataset = load_dataset(make_dataset([{"metadata": {"task": "a"}}, {"metadata": {"task": "b"}}]))
    assert dataset.n_without_messages == 2
    assert dataset.rows[1].session_input() == {"metadata": {"task": "b"}}


def test_blank_lines_count_as_lines_but_not_as_rows(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", ["\n", {"input": "a"}, "  \n", {"input": "b"}])
    dataset = load_dataset(str(path))
    assert [(task.row, task.source) for task in dataset.rows] == [(0, f"{path}:2"), (1, f"{path}:4")]


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"input": "a"}\r\n{"input": "b"}\r\n')
    assert inputs(load_dataset(str(path))) == ["a", "b"]


@given(
    count=st.integers(1, 12),
    start=st.none() | st.integers(-15, 15),
    stop=st.none() | st.integers(-15, 15),
    kind=st.sampled_from(["jsonl", "parquet"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_slices_are_those_of_a_list(tmp_path, count, start, stop, kind):
    rows = [{"input": f"r{number}"} for number in range(count)]
    path = tmp_path / f"{count}.{kind}"
    if not path.exists():
        write_lines(path, rows) if kind == "jsonl" else write_table(path, rows)
    spec = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    expected = [row["input"] for row in rows][start:stop]
    if not expected:
        with pytest.raises(ConfigError, match="holds no rows in this slice"):
            load_dataset(spec)
        return
    dataset = load_dataset(spec)
    assert inputs(dataset) == expected
    assert [task.row for task in dataset.rows] == list(range(len(expected)))
    assert dataset.rows[0].source == f"{path}:{rows.index({'input': expected[0]}) + 1}"


def test_a_slice_across_parquet_batches_and_row_groups(tmp_path):
    path = write_table(tmp_path / "d.parquet", [{"input": f"r{n}"} for n in range(5000)], row_group_size=700)
    dataset = load_dataset(f"{path}@[1000:-1500]")
    assert inputs(dataset) == [f"r{n}" for n in range(1000, 3500)]
    assert dataset.rows[-1].source == f"{path}:3500"


def test_rows_outside_the_slice_are_not_looked_at(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", ["broken\n", {"input": "a"}, "broken\n"])
    assert inputs(load_dataset(f"{path}@[1:2]")) == ["a"]
    assert inputs(load_dataset(f"{path}@[-2:-1]")) == ["a"]


def test_an_at_sign_in_a_path_is_no_slice(tmp_path):
    assert inputs(load_dataset(str(write_lines(tmp_path / "me@home.jsonl", [{"input": "a"}])))) == ["a"]
    path = write_lines(tmp_path / "odd@[0:1]", [{"input": "a"}, {"input": "b"}])
    assert inputs(load_dataset(str(path))) == ["a", "b"]
    assert inputs(load_dataset(f"{path}@[1:]")) == ["b"]


@pytest.mark.parametrize("inside", ["5", "a:b", "0:10:2", ":-", ""])
def test_brackets_that_are_no_slice_are_refused(tmp_path, inside):
    path = write_lines(tmp_path / "d.jsonl", [{"input": "a"}])
    with pytest.raises(ConfigError, match="is no slice; write PATH@\\[a:b\\]"):
        load_dataset(f"{path}@[{inside}]")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("not json\n", "is no JSON"),
        ('{"input": NaN}\n', "NaN is not a JSON number"),
        ('["input"]\n', "must be a JSON object, not a list"),
        ({"inputs": "a", "id": 3}, r"has no input \(its keys: inputs, id\); did you mean inputs\?"),
        ({}, r"has no input \(the row is empty\)"),
        ({"input": None, "metadata": {}}, "has no input"),
        ({"input": ""}, "input is empty"),
        ({"input": []}, "input is empty"),
        ({"input": 5}, "input must be a string or a message list, not a number"),
        ({"input": [{"role": "king", "content": "a"}]}, r"input\[0\]"),
        ({"input": [{"role": "user", "content": ""}]}, r"input\[0\]\.content"),
        ({"input": "a", "metadata": "b"}, "metadata must be an object, not a string"),
        ('{"input": "a", "metadata": {"x": [1, 1e999]}}\n', r"metadata\.x\[1\] is inf"),
        ('{"input": "a\\ud800"}\n', "half a surrogate pair"),
        ('{"input": "a", "metadata": {"x": ' + "[" * 120 + "]" * 120 + "}}\n", "nested more than 100 deep"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, said):
    path = write_lines(tmp_path / "d.jsonl", [{"input": "good"}, row])
    with pytest.raises(ConfigError, match=said) as caught:
        load_dataset(str(path))
    assert str(caught.value).startswith(f"{path}:2: ")


def test_bytes_that_are_no_utf8_are_named_by_line(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"input": "a"}\n{"input": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"d\.jsonl:2: is no JSON"):
        load_dataset(str(path))


def test_a_json_array_file_is_told_what_to_do(tmp_path):
    path = tmp_path / "d.json"
    path.write_text('[\n{"input": "a"}\n]\n')
    with pytest.raises(ConfigError, match=r"d\.json:1: .*one object per line, not a JSON array"):
        load_dataset(str(path))


def test_a_missing_label_is_named(make_dataset):
    path = make_dataset([{"input": "a", "answers": "1"}])
    with pytest.raises(ConfigError, match=r"answer .*did you mean answers"):
        load_dataset(path, label_key="answer")


def test_a_null_label_is_a_label(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [{"input": "a", "answer": None}])
    assert load_dataset(str(path), label_key="answer").rows[0].label is None


def test_input_and_label_may_be_one_key(make_dataset):
    assert load_dataset(make_dataset([{"input": "a"}]), label_key="input").rows[0].label == "a"


def test_a_parquet_file_without_the_columns_is_refused_at_once(tmp_path):
    path = write_table(tmp_path / "d.parquet", [{"inputs": "a"}])
    with pytest.raises(ConfigError, match=r"has no column input .*did you mean inputs\?"):
        load_dataset(str(path))


def test_a_parquet_value_that_json_does_not_have_is_named_by_row(tmp_path):
    rows = [{"input": "a", "day": None}, {"input": "b", "day": datetime.date(2024, 1, 1)}]
    path = write_table(tmp_path / "d.parquet", rows)
    with pytest.raises(ConfigError, match=r"d\.parquet:2: day is a date, which JSON does not have"):
        load_dataset(str(path), label_key="day")


def test_a_file_that_only_claims_to_be_parquet_is_refused(tmp_path):
    path = write_lines(tmp_path / "d.parquet", [{"input": "a"}])
    with pytest.raises(ConfigError, match="is no Parquet file"):
        load_dataset(str(path))


def test_a_damaged_parquet_file_is_refused(tmp_path):
    path = tmp_path / "d.parquet"
    path.write_bytes(b"PAR1" + b"\0" * 40)
    with pytest.raises(ConfigError, match="no readable Parquet file"):
        load_dataset(str(path))


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_dataset_without_rows_is_refused(tmp_path, content):
    path = tmp_path / "d.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"holds no rows$"):
        load_dataset(str(path))


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_dataset(str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_dataset(str(tmp_path))
