"""Dumps: exact round trips, and files that anybody can read."""

from __future__ import annotations

import json
from array import array

import pytest
from attrs import asdict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_trio.data.image import EncodedImage
from relax_trio.data.messages import ImagePart, Message, TextPart, ToolCall
from relax_trio.data.sample import Sample, VersionSpan
from relax_trio.errors import ConfigError, EngineFault, RunFailed
from relax_trio.ids import GroupId, PlaceId, WeightVersion
from relax_trio.observe.dump import (
    SessionFacts,
    check_dump_template,
    dump_path,
    read_rollout_dump,
    session_facts,
    write_rollout_dump,
)
from relax_trio.observe.sample_json import message_from_json, message_to_json, sample_from_json, sample_to_json
from relax_trio.runtime.outcome import SessionReport
from relax_trio.testing.sample import make_sample

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

text = st.text(st.characters(), max_size=12)  # half surrogate pairs among them
finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | finite | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(text, json_values, max_size=3)
calls = st.builds(ToolCall, id=text, name=text, arguments=text)
parts = st.lists(st.builds(TextPart, text) | st.builds(ImagePart, text), max_size=3).map(tuple)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=st.none() | text | parts,
    reasoning_content=st.none() | text,
    tool_calls=st.lists(calls, max_size=2).map(tuple),
    tool_call_id=st.none() | text,
)
images = st.builds(EncodedImage, url=text, n_tokens=st.integers(1, 2**20))
spans = st.builds(VersionSpan, version=text.map(WeightVersion), n_tokens=st.integers(0, 2**40))


@st.composite
def samples(draw):
    n = draw(st.integers(0, 6))
    return Sample(
        prompt=draw(json_values),
        response=draw(text),
        label=draw(json_values),
        tokens=array("i", draw(st.lists(st.integers(0, 2**31 - 1), max_size=6))),
        response_length=n,
        loss_mask=bytearray(draw(st.lists(st.sampled_from([0, 1]), min_size=n, max_size=n))),
        rollout_log_probs=array("d", draw(st.lists(finite, min_size=n, max_size=n))),
        reward=draw(st.none() | finite | st.integers(-5, 5) | json_objects),
        metadata=draw(json_objects),
        train_metadata=draw(json_objects),
        index=draw(st.integers(0, 2**40)),
        group_index=draw(st.integers(0, 2**40)),
        status=draw(st.sampled_from(["completed", "truncated"])),
        weight_versions=tuple(draw(st.lists(spans, max_size=3))),
        place=PlaceId(draw(text)),
        group=GroupId(draw(text)),
        name=draw(st.none() | text),
        row=draw(st.integers(0, 2**40)),
        messages=tuple(draw(st.lists(messages, max_size=3))),
        turn_lens=tuple(draw(st.lists(st.integers(0, 2**20), max_size=3))),
        turn_starts=tuple(draw(st.lists(st.integers(0, 2**20), max_size=3))),
        advantage=draw(st.none() | finite),
        images=tuple(draw(st.lists(images, max_size=2))),
    )


def test_a_row_of_a_dump_without_images_is_read():
    value = sample_to_json(make_sample())
    del value["images"]

    assert sample_from_json(value).images == ()


@unhurried
@given(samples())
def test_a_row_survives_the_round_trip_through_json_text_exactly(sample):
    back = sample_from_json(json.loads(json.dumps(sample_to_json(sample), allow_nan=False)))

    assert asdict(back, recurse=False) == asdict(sample, recurse=False)
    assert repr(asdict(back, recurse=False)) == repr(asdict(sample, recurse=False))  # 1 is not 1.0, -0.0 not 0.0


@unhurried
@given(messages)
def test_a_message_survives_the_round_trip_exactly(message):
    assert message_from_json(message_to_json(message)) == message


FACTS = SessionFacts(
    place=PlaceId("G0/0"),
    status="completed",
    n_turns=1,
    seconds=2.5,
    state_hashes=("00ff", "abcd"),
    requests=({"id": "r1", "seconds": 1.5, "attempts": [{"finish": "stop"}]},),
    abort_count=0,
    weight_versions=(VersionSpan(version=WeightVersion("3"), n_tokens=4),),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(samples(), max_size=3), json_objects)
def test_a_dump_is_read_back_as_it_was_written(tmp_path_factory, rows, extra):
    template = str(tmp_path_factory.mktemp("dump") / "step-{rollout_id}.jsonl")

    dump = read_rollout_dump(write_rollout_dump(template, 7, rows, sessions=[FACTS], extra=extra))

    assert (dump.rollout_id, dump.evaluation, dump.extra, dump.sessions) == (7, False, extra, (FACTS,))
    assert [sample_to_json(row) for row in dump.samples] == [sample_to_json(row) for row in rows]


def test_a_dump_is_plain_json_lines_with_readable_text(tmp_path):
    row = make_sample(response="数字 2", reward={"score": 1}, metadata={"trace": ["complete", {"deep": None}]})

    path = write_rollout_dump(str(tmp_path / "a" / "{rollout_id}.jsonl"), 0, [row], sessions=[FACTS])

    text = path.read_text(encoding="utf-8")
    head, session, sample = (json.loads(line) for line in text.splitlines())
    assert "数字 2" in text
    assert head == {"kind": "rollout", "format": 1, "rollout_id": 0, "evaluation": False, "extra": {}}
    assert (session["kind"], session["state_hashes"], session["abort_count"]) == ("session", ["00ff", "abcd"], 0)
    assert (sample["kind"], sample["place"], sample["tokens"]) == ("sample", "G0/0", [0, 1, 2, 3, 4, 5, 6])
    assert sample["metadata"] == {"trace": ["complete", {"deep": None}]}
    assert [p.name for p in path.parent.iterdir()] == ["0.jsonl"]


def test_steps_and_evaluations_get_files_of_their_own():
    assert dump_path("d/{rollout_id}.{x}.jsonl", 3).name == "3.{x}.jsonl"
    assert dump_path("d/{rollout_id}.jsonl", 3, evaluation=True).name == "eval_3.jsonl"


def test_a_template_without_the_step_number_is_refused():
    with pytest.raises(ConfigError, match=r"--save-debug-rollout-data dump\.jsonl: must hold \{rollout_id\}"):
        check_dump_template("dump.jsonl")


def test_facts_are_made_from_what_the_runtime_remembers_and_from_the_sessions_rows():
    report = SessionReport(
        place=PlaceId("G0/1"),
        seconds=4.0,
        n_requests=2,
        n_attempts=3,
        n_aborted=1,
        oldest_version=WeightVersion("0"),
        n_restored=0,
        n_shared_tokens=0,
        flags={},
        requests=(
            {"id": "r1", "attempts": [{"finish": "abort"}, {"finish": "stop"}]},
            {"id": "r2", "attempts": [{"finish": None}]},
        ),
        state_hashes=("aa",),
    )
    rows = [make_sample(place=0, turn_lens=(9,)), make_sample(place=1, turn_lens=(2, 3))]

    facts = session_facts(report, rows)

    assert (facts.place, facts.status, facts.n_turns, facts.abort_count) == ("G0/1", "completed", 2, 1)
    assert facts.weight_versions == (VersionSpan(version=WeightVersion("0"), n_tokens=5),)
    assert session_facts(report, [], status="failed", error="it broke").error == "it broke"


def test_a_value_that_is_no_json_is_a_fault_that_names_the_place(tmp_path):
    with pytest.raises(EngineFault, match="G0/0"):
        write_rollout_dump(str(tmp_path / "{rollout_id}"), 0, [make_sample(metadata={"x": float("nan")})])
    assert not (tmp_path / "0").exists()


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(RunFailed, match="the dump of step 4"):
        write_rollout_dump(str(tmp_path / "file" / "{rollout_id}"), 4, [])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("{", ":1 is no line"),
        ('{"kind": "sample"}\n', ":1 is no line"),
        ('{"kind": "rollout", "format": 99}\n', "reads format 1"),
        ('{"kind": "rollout", "format": 1, "rollout_id": 0}\n{"kind": "sample"}\n', ":2 is no line"),
    ],
)
def test_a_broken_dump_is_named_with_its_line(tmp_path, content, says):
    path = tmp_path / "dump"
    path.write_text(content)

    with pytest.raises(ConfigError, match=says):
        read_rollout_dump(path)
