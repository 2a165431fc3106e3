"""Recorded answers of real servers of two versions, read as an attempt's leg, as server facts or as errors."""

from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_wire import DATA, VERSIONS, answer_of, recorded

from relax_trio.backend.base import SamplingParams
from relax_trio.backend.sglang import wire
from relax_trio.errors import BackendError, BackendProtocolError, BackendRejected, BackendUnavailable

GENERATED = [
    (version, path.stem)
    for version in VERSIONS
    for path in sorted((DATA / version).glob("*.json"))
    if recorded(version, path.stem)[0]["path"] == "/generate"
    and recorded(version, path.stem)[1]["status"] == 200
    and '"return_logprob": true' in recorded(version, path.stem)[0]["body"]
    and not recorded(version, path.stem)[1]["body"].startswith("[")
]
"""Single answers with logprobs: what the backend asks for."""


def leg_of(version, name):
    return wire.read_leg(*answer_of(version, name), f"{name} of {version}")


@pytest.mark.parametrize(("version", "name"), GENERATED)
def test_a_recorded_answer_is_read_as_the_server_told_it(version, name):
    told = json.loads(answer_of(version, name)[1])

    leg = leg_of(version, name)

    assert leg.token_ids.tolist() == told["output_ids"]
    assert leg.logprobs.tolist() == [row[0] for row in told["meta_info"]["output_token_logprobs"]]
    assert leg.finish == told["meta_info"]["finish_reason"]["type"]
    assert sum(span.n_tokens for span in leg.versions) == len(told["output_ids"])
    if leg.versions:
        assert leg.versions[-1].version == told["meta_info"]["weight_version"]


def test_there_are_recordings_of_both_versions():
    assert {version for version, _ in GENERATED} == set(VERSIONS)
    assert len(GENERATED) > 20


@pytest.mark.parametrize("version", VERSIONS)
def test_an_abort_while_it_runs_brings_what_there_is_with_logprobs(version):
    leg = leg_of(version, "04_abort_victim_generate")

    assert leg.finish == "abort"
    assert len(leg.token_ids) == len(leg.logprobs) > 50


def test_an_abort_while_it_is_queued_brings_nothing():
    leg = leg_of("0.5.23", "12_queued_abort_victim")

    assert (leg.finish, len(leg.token_ids), leg.versions, leg.cached_len) == ("abort", 0, (), 0)


def test_versions_come_in_spans_where_the_server_tells_them():
    spans = leg_of("0.5.23", "07_update_in_retract_victim").versions
    assert [(span.version, span.n_tokens) for span in spans] == [("step-4", 95), ("step-5", 205)]
    spans = leg_of("0.5.23", "07_update_in_pause_victim").versions
    assert [(span.version, span.n_tokens) for span in spans] == [("step-3", 103), ("step-4", 197)]


def test_an_older_server_names_the_last_version_for_all():
    spans = leg_of("0.5.15.post1", "07_update_in_pause_victim").versions

    assert [(span.version, span.n_tokens) for span in spans] == [("step-4", 300)]


@pytest.mark.parametrize(("version", "told"), [("0.5.15.post1", False), ("0.5.23", True)])
def test_whether_spans_are_told_is_seen_in_any_answer(version, told):
    assert wire.has_spans(answer_of(version, "01_generate_ids_rid")[1]) is told


@pytest.mark.parametrize("version", VERSIONS)
def test_a_matched_stop_string_is_told_and_its_tokens_are_kept(version):
    leg = leg_of(version, "01_generate_stop_string_no_trim")

    assert (leg.finish, leg.stop_string, len(leg.token_ids)) == ("stop", "was", 6)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stop_token_is_kept_and_is_no_stop_string(version):
    leg = leg_of(version, "01_generate_stop_token_id_noignore")

    assert (leg.finish, leg.stop_string, leg.token_ids[-1]) == ("stop", None, 1046)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("03_err_prompt_too_long", BackendRejected, "exceeds the context"),
        ("03_err_prompt_plus_max_new_too_long", BackendRejected, "exceeds the context"),
        ("03_err_empty_ids", BackendRejected, "cannot be empty"),
        ("03_err_top_p", BackendRejected, "top_p"),
        ("03_err_negative_temperature", BackendRejected, "temperature"),
        ("03_err_bad_type_ids", BackendRejected, "validation error"),
        ("04_dup_rid_second", BackendRejected, "Duplicate request ID"),
        ("08_session_unknown", BackendRejected, "does not exist"),
        ("00_not_found", BackendProtocolError, "Not Found"),
        ("01_generate_n2", BackendProtocolError, "no object"),
        ("01_generate_ids_no_logprob", BackendProtocolError, "0 logprobs for 8 tokens"),
    ],
)
def test_recorded_errors_say_what_was_wrong(version, name, error, words):
    with pytest.raises(error, match=words):
        leg_of(version, name)


def test_a_server_in_trouble_is_unavailable_and_may_be_asked_again():
    with pytest.raises(BackendUnavailable) as caught:
        leg_of("0.5.15.post1", "03_err_unknown_sampling_param")  # a 500
    assert caught.value.retryable


@pytest.mark.parametrize("version", VERSIONS)
def test_facts_about_the_server_are_read(version):
    info = wire.read_info(*answer_of(version, "00_server_info"), "info")

    assert (info.version, info.max_context_len, info.max_total_tokens) == (version, 4090, 16384)


def _broken(change):
    """A recorded answer with one thing changed."""
    told = json.loads(answer_of("0.5.23", "01_generate_ids_rid")[1])
    change(told, told["meta_info"])
    return json.dumps(told).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda told, meta: told.update(output_ids=None),
        lambda told, meta: told.update(output_ids=["a"] * 8),
        lambda told, meta: told.update(meta_info=[]),
        lambda told, meta: told["output_ids"].pop(),
        lambda told, meta: told["output_ids"].reverse(),
        lambda told, meta: meta["output_token_logprobs"][3].__setitem__(0, None),
        lambda told, meta: meta.update(finish_reason=None),
        lambda told, meta: meta.update(finish_reason={"type": "tired"}),
        lambda told, meta: meta.update(weight_versions=[{"version": "v", "start": 0, "end": 7}]),
        lambda told, meta: meta.update(weight_versions=[{"version": "v", "start": 1, "end": 8}]),
        lambda told, meta: meta.update(weight_versions=None, weight_version=None),
    ],
)
def test_an_answer_that_breaks_the_contract_is_refused(change):
    with pytest.raises(BackendProtocolError):
        wire.read_leg(200, _broken(change), "attempt x")


@given(st.integers(), st.binary(max_size=200))
def test_whatever_a_server_says_is_a_leg_or_an_error_of_ours(status, body):
    try:
        leg = wire.read_leg(status, body, "attempt x")
    except BackendError:
        return
    assert len(leg.token_ids) == len(leg.logprobs)


def test_every_field_of_a_request_is_one_that_was_seen_to_work():
    sampling = SamplingParams(max_new_tokens=9, stop=("x",), stop_token_ids=(2,), seed=2**63 + 5)

    body = json.loads(wire.generate_body("r", array("i", [1, 2]), sampling, 7, "s"))

    assert body["input_ids"] == [1, 2]
    assert body["return_logprob"] is True
    assert body["session_id"] == "s"
    params = body["sampling_params"]
    assert (params["max_new_tokens"], params["sampling_seed"]) == (7, 5)
    assert params["no_stop_trim"] is True
    assert params["skip_special_tokens"] is False
    assert params["ignore_eos"] is False  # it would switch stop tokens off
    allowed = {"rid", "input_ids", "sampling_params", "return_logprob", "stream", "session_id"}
    assert set(body) == allowed


def test_a_session_is_named_only_where_its_lifecycle_is_on():
    body = json.loads(wire.generate_body("r", array("i", [1]), SamplingParams(max_new_tokens=1), 1))

    assert "session_id" not in body


@pytest.mark.parametrize("version", VERSIONS)
def test_a_routing_key_is_a_field_that_servers_of_both_versions_take(version):
    request, response = recorded(version, "01_generate_conversation_routing_keys")
    assert json.loads(request["body"])["routing_key"] == "k1"
    assert response["status"] == 200

    sampling = SamplingParams(max_new_tokens=1)
    body = json.loads(wire.generate_body("r", array("i", [1]), sampling, 1, routing_key="G1/0-0"))
    assert body["routing_key"] == "G1/0-0"
    assert "routing_key" not in json.loads(wire.generate_body("r", array("i", [1]), sampling, 1))
