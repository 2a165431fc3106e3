"""The official Anthropic SDK against the real server, in a process of its own on the real clock."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import trio
from builders_api import OPERATOR, CountingDirectory, FakeSession, make_completion, make_tool_message

from relax_trio.api.app import make_app
from relax_trio.api.sealed import seal
from relax_trio.api.serve import ApiServer
from relax_trio.config.tree import ServerConfig
from relax_trio.data.messages import Message
from relax_trio.errors import ContextLengthExceeded, InternalError
from relax_trio.sync.cpu import ThreadCpuPool

CLIENT = Path(__file__).parent / "anthropic_sdk_client.py"
pytestmark = pytest.mark.process


def make_directory() -> CountingDirectory:
    tool_turn = make_completion(make_tool_message(content="so", reasoning_content="hm"), finish="tool_calls")
    return CountingDirectory(
        {
            "text": FakeSession(),
            "stopped": FakeSession(answer=make_completion(stop_sequence="END")),
            "cut": FakeSession(answer=make_completion(finish="length")),
            "tools": FakeSession(answer=tool_turn),
            "talk": FakeSession(answer=tool_turn),
            "full": FakeSession(refusal=ContextLengthExceeded(n_prompt=99, max_context_len=64)),
            "failed": FakeSession(answer=InternalError("the engine failed r1")),
        }
    )


async def run_client(directory: CountingDirectory) -> dict:
    config = ServerConfig()
    app = make_app(
        directory,
        config=config,
        operator_token=OPERATOR,
        cpu=ThreadCpuPool(1),
        model_name="demo",
        template_variables=frozenset({"enable_thinking"}),
    )
    server = ApiServer(app, config)
    async with trio.open_nursery() as nursery:
        url = await nursery.start(server.run)
        argv = [sys.executable, str(CLIENT), url]
        env = {**os.environ, "NO_PROXY": "127.0.0.1"}
        with trio.fail_after(120):
            done = await trio.run_process(argv, capture_stdout=True, capture_stderr=True, check=False, env=env)
        server.stop()
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def directory():
    return make_directory()


@pytest.fixture(scope="module")
def seen(directory):
    """What the client printed; one run for all tests, because importing the SDK takes seconds."""
    return trio.run(run_client, directory)


def blocks_of(message: dict) -> list[dict]:
    return [{key: value for key, value in block.items() if value is not None} for block in message["content"]]


def test_a_reply_parses_into_the_typed_models(seen):
    message = seen["text"]

    assert (message["model"], message["role"], message["id"]) == ("claude-x", "assistant", "msg_G17-2-r1")
    assert blocks_of(message) == [{"type": "text", "text": "Grüße"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    usage = message["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (2, 5, 3)
    assert usage["cache_creation_input_tokens"] == 0


def test_stop_reasons_parse(seen):
    assert (seen["stopped"]["stop_reason"], seen["stopped"]["stop_sequence"]) == ("stop_sequence", "END")
    assert (seen["cut"]["stop_reason"], seen["cut"]["stop_sequence"]) == ("max_tokens", None)
    assert seen["tools"]["stop_reason"] == "tool_use"


def test_thinking_text_and_calls_parse(seen):
    assert blocks_of(seen["tools"]) == [
        {"type": "thinking", "thinking": "hm", "signature": seal("hm")},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "call_1", "name": "calc", "input": {"a": 2}},
        {"type": "tool_use", "id": "call_2_valuejson", "name": "calc", "input": {"value": 3}},
    ]


def test_the_streaming_helper_puts_the_same_message_together(seen):
    streamed = seen["stream"]["final"]

    assert blocks_of(streamed) == blocks_of(seen["tools"])
    assert streamed["usage"] == seen["tools"]["usage"]
    assert streamed["stop_reason"] == "tool_use"
    assert blocks_of(seen["text_stream"]["final"]) == blocks_of(seen["text"])
    assert {"thinking", "signature", "text", "input_json"} <= set(seen["stream"]["kinds"])
    assert seen["async"] == ["Grüße"]


def test_a_plain_stream_has_the_events_of_the_protocol(seen):
    assert seen["events"] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_content_objects_sent_back_are_the_message_that_was_given(seen, directory):
    assert seen["conversation"] == [{"a": 2}, {"value": 3}]
    first, second = directory.sessions["talk"].calls

    assert second.request.messages == (
        *first.request.messages,
        make_tool_message(content="so", reasoning_content="hm"),
        Message(role="tool", content="4", tool_call_id="call_1"),
        Message(role="tool", content="4", tool_call_id="call_2"),
    )
    assert second.request.tools == first.request.tools


def test_what_the_sdk_asks_for_reaches_the_session(seen, directory):
    assert seen["text"]
    (request,) = (call.request for call in directory.sessions["text"].calls[:1])
    (thinking, _) = (call.request for call in directory.sessions["tools"].calls)

    assert request.messages[0] == Message(role="system", content="terse")
    assert request.max_tokens == 64
    assert directory.sessions["stopped"].calls[0].request.stop == ("END",)
    assert thinking.chat_template_kwargs == {"enable_thinking": True}


def test_auth_tokens_and_beta_calls_are_served(seen):
    assert seen["auth_token"] == "Grüße"
    assert seen["beta"]["content"][0]["text"] == "Grüße"


def test_models_are_listed(seen):
    (listed,) = seen["models"]["listed"]

    assert (listed["id"], listed["type"], listed["display_name"]) == ("demo", "model", "demo")
    assert seen["models"]["one"]["id"] == "Qwen/Qwen3-8B"


def test_tokens_are_counted_without_a_request(seen, directory):
    assert seen["count"] == 7
    (request,) = directory.sessions["text"].counted
    assert request.messages == (Message(role="user", content="hi"),)
    assert [tool["function"]["name"] for tool in request.tools] == ["calc"]


@pytest.mark.parametrize("name", ["unknown", "unknown_models"])
def test_an_ended_session_is_not_retried(seen, directory, name):
    assert (seen[name]["type"], seen[name]["should_retry"]) == ("NotFoundError", "false")
    assert seen[name]["body"]["error"]["type"] == "not_found_error"
    assert directory.lookups["unknown"] == 2


def test_a_bad_request_names_its_field(seen):
    assert seen["bad"]["type"] == "BadRequestError"
    assert seen["bad"]["body"]["type"] == "error"
    assert seen["bad"]["body"]["error"]["type"] == "invalid_request_error"
    assert "tool_choice.type" in seen["bad"]["body"]["error"]["message"]


def test_an_image_is_taken(seen):
    assert seen["image"] is None


@pytest.mark.parametrize("kind", ["full", "full_stream", "full_count"])
def test_a_full_context_is_what_harnesses_look_for(seen, kind):
    assert (seen[kind]["type"], seen[kind]["should_retry"]) == ("BadRequestError", "false")
    assert seen[kind]["body"]["error"]["message"] == "prompt is too long: 99 tokens > 64 maximum"


def test_an_internal_error_is_not_retried(seen, directory):
    assert (seen["failed"]["type"], seen["failed"]["status"]) == ("InternalServerError", 500)
    assert seen["failed"]["body"]["error"] == {"type": "api_error", "message": "the engine failed r1"}
    assert seen["failed_stream"]["body"]["error"] == {"type": "api_error", "message": "the engine failed r1"}
    assert directory.lookups["failed"] == 2


def test_every_reply_counts_as_delivered(seen, directory):
    assert seen
    ends = [end for session in directory.sessions.values() for end in session.ends]

    assert {how for how, _ in ends} == {"delivered"}
    assert all(call.n_holds == 0 for session in directory.sessions.values() for call in session.calls)
