"""The data source of a run: order, rows that come back, rows set aside, resume."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.data.rows import RowStream
from relax_trio.data.task import TaskInput
from relax_trio.errors import ConfigError, EngineFault, RunFailed


def make_rows(count):
    return tuple(
        TaskInput(row=row, source=f"d.jsonl:{row + 1}", prompt=None, messages=(), metadata={"n": row})
        for row in range(count)
    )


def make_stream(rows, *, seed=1, shuffle=True):
    return RowStream(rows=rows, seed=seed, shuffle=shuffle)


def take_rows(stream, count):
    return [stream.take().row for _ in range(count)]


def through_json(position):
    return json.loads(json.dumps(position))


def test_each_epoch_holds_every_row_once_in_an_order_of_its_own():
    stream = make_stream(make_rows(50))
    epochs = [take_rows(stream, 50) for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert stream.epoch == 2


def test_order_is_a_function_of_seed_and_epoch():
    rows = make_rows(20)
    assert take_rows(make_stream(rows), 60) == take_rows(make_stream(rows), 60)
    assert take_rows(make_stream(rows), 20) != take_rows(make_stream(rows, seed=2), 20)


def test_order_of_a_seed_is_the_same_in_every_release():
    # A checkpoint of an older release must resume to the order that it was made with.
    pinned = [4, 2, 0, 6, 5, 7, 1, 3, 7, 1, 2, 0, 3, 5, 4, 6]
    assert take_rows(make_stream(make_rows(8), seed=42), 16) == pinned


def test_without_shuffle_the_file_order_repeats():
    assert take_rows(make_stream(make_rows(3), shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_given_back_rows_come_first_in_the_order_they_were_due():
    stream = make_stream(make_rows(10), shuffle=False)
    tasks = [stream.take() for _ in range(5)]
    for index in (3, 0, 2):
        stream.give_back(tasks[index])
    assert take_rows(stream, 5) == [0, 2, 3, 5, 6]
    assert (stream.n_taken, stream.n_given_back) == (10, 3)


def test_a_set_aside_row_is_never_taken_again():
    rows = make_rows(4)
    stream = make_stream(rows, shuffle=False)
    tasks = [stream.take() for _ in range(2)]
    stream.give_back(tasks[0])
    stream.set_aside(tasks[0], "failed 3 times")
    stream.set_aside(tasks[1], "failed 3 times")
    stream.give_back(tasks[1])
    assert take_rows(stream, 5) == [2, 3, 2, 3, 2]
    assert [(row.source, row.why) for row in stream.set_aside_rows] == [
        ("d.jsonl:1", "failed 3 times"),
        ("d.jsonl:2", "failed 3 times"),
    ]


def test_taking_from_a_stream_whose_rows_are_all_set_aside_fails_with_the_reasons():
    stream = make_stream(make_rows(5))
    for number, task in enumerate([stream.take() for _ in range(5)]):
        stream.set_aside(task, f"reason {number}")
    with pytest.raises(RunFailed, match=r"every one of the 5 rows .* reason 4 \(the last 3\)"):
        stream.take()


def test_rows_of_another_stream_and_rows_never_taken_are_refused():
    rows = make_rows(3)
    stream = make_stream(rows, shuffle=False)
    stream.take()
    with pytest.raises(EngineFault, match="never taken"):
        stream.give_back(rows[2])
    with pytest.raises(EngineFault, match="never taken"):
        stream.give_back(make_rows(3)[0])
    with pytest.raises(EngineFault, match="not of this stream"):
        stream.set_aside(make_rows(3)[0], "why")


def test_more_rows_cannot_come_back_than_were_taken():
    stream = make_stream(make_rows(3))
    task = stream.take()
    stream.give_back(task)
    with pytest.raises(EngineFault, match="given back twice"):
        stream.give_back(task)


operations = st.lists(
    st.one_of(
        st.just(("take", 0)),
        st.just(("take", 0)),
        st.tuples(st.sampled_from(["give_back", "done", "set_aside"]), st.integers(0, 30)),
    ),
    max_size=80,
)


def apply(stream, steps, out):
    """Run `steps`; `out` holds the rows at work. Returns the rows taken, in order."""
    taken = []
    for name, which in steps:
        if name == "take":
            if len(stream.set_aside_rows) == len(stream.rows):
                continue
            task = stream.take()
            taken.append(task.row)
            out.append(task)
        elif out:
            task = out.pop(which % len(out))
            if name == "give_back":
                stream.give_back(task)
            elif name == "set_aside":
                stream.set_aside(task, "why")
    return taken


@given(n_rows=st.integers(1, 12), shuffle=st.booleans(), seed=st.integers(0, 5), steps=operations)
@settings(deadline=None)
def test_no_row_is_lost_or_doubled(n_rows, shuffle, seed, steps):
    """Epoch by epoch: a row that was not set aside is done, at work, waiting to come again, or still ahead."""
    stream = make_stream(make_rows(n_rows), seed=seed, shuffle=shuffle)
    out, done = [], Counter()
    for step in steps:
        before = list(out)
        apply(stream, [step], out)
        if step[0] == "done" and before:
            done[before[step[1] % len(before)].row] += 1
    for task in out:
        stream.give_back(task)
    aside = {row.source for row in stream.set_aside_rows}
    live = {task.row for task in stream.rows if task.source not in aside}
    epoch = stream.epoch
    while live:
        task = stream.take()
        if stream.epoch > epoch:
            break
        done[task.row] += 1
    assert {row: done[row] for row in live} == dict.fromkeys(live, epoch + 1)


@given(n_rows=st.integers(1, 12), shuffle=st.booleans(), seed=st.integers(0, 5), before=operations, after=operations)
@settings(max_examples=200, deadline=None)
def test_a_resumed_stream_goes_on_as_the_unbroken_one(n_rows, shuffle, seed, before, after):
    rows = make_rows(n_rows)
    unbroken = make_stream(rows, seed=seed, shuffle=shuffle)
    at_work: list[TaskInput] = []
    apply(unbroken, before, at_work)
    position = through_json(unbroken.position(at_work))
    for task in at_work:
        unbroken.give_back(task)
    resumed = make_stream(rows, seed=seed, shuffle=shuffle)
    resumed.restore(position)
    assert apply(resumed, after, []) == apply(unbroken, after, [])
    assert resumed.position() == unbroken.position()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 2}, "--rollout-seed was 1, is 2"),
        ({"shuffle": False}, "--rollout-shuffle was True, is False"),
    ],
)
def test_a_position_of_another_order_is_refused(changed, said):
    rows = make_rows(4)
    position = make_stream(rows).position()
    with pytest.raises(ConfigError, match=said):
        make_stream(rows, **changed).restore(position)


def test_a_position_of_another_dataset_is_refused():
    with pytest.raises(ConfigError, match=r"--prompt-data \(its number of rows\) was 4, is 5"):
        make_stream(make_rows(5)).restore(make_stream(make_rows(4)).position())


@pytest.mark.parametrize(
    "damage",
    [{"index": 9}, {"epoch": -1}, {"epoch": True}, {"returned": [[0]]}, {"returned": [[0, 4]]}, {"set_aside": None}],
)
def test_a_damaged_position_is_refused_and_changes_nothing(damage):
    rows = make_rows(4)
    stream = make_stream(rows)
    with pytest.raises(ConfigError, match="damaged"):
        stream.restore({**stream.position(), **damage})
    assert take_rows(stream, 8) == take_rows(make_stream(rows), 8)


def test_restore_on_a_stream_in_use_is_a_fault():
    stream = make_stream(make_rows(4))
    position = stream.position()
    stream.take()
    with pytest.raises(EngineFault, match="in use"):
        stream.restore(position)
