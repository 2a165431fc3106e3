"""The official OpenAI SDK against the real server, in a process of its own on the real clock."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import trio
from builders_api import OPERATOR, CountingDirectory, FakeSession, make_completion, make_tool_message

from relax_trio.api.app import make_app
from relax_trio.api.serve import ApiServer
from relax_trio.config.tree import ServerConfig
from relax_trio.data.messages import Message
from relax_trio.data.request import TokenLogprob
from relax_trio.errors import ContextLengthExceeded, InternalError
from relax_trio.sync.cpu import ThreadCpuPool

CLIENT = Path(__file__).parent / "openai_sdk_client.py"
pytestmark = pytest.mark.process


def make_directory() -> CountingDirectory:
    logprobs = (TokenLogprob(token="Grüße", token_id=5, logprob=-0.5),)
    tool_turn = make_completion(make_tool_message(reasoning_content="hm"), finish="tool_calls")
    return CountingDirectory(
        {
            "text": FakeSession(answer=make_completion(logprobs=logprobs)),
            "tools": FakeSession(answer=tool_turn),
            "talk": FakeSession(answer=tool_turn),
            "full": FakeSession(refusal=ContextLengthExceeded(n_prompt=99, max_context_len=64)),
            "failed": FakeSession(answer=InternalError("the engine failed r1")),
        }
    )


async def run_client(directory: CountingDirectory) -> dict:
    config = ServerConfig()
    app = make_app(directory, config=config, operator_token=OPERATOR, cpu=ThreadCpuPool(1), model_name="demo")
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


def test_a_reply_parses_into_the_typed_models(seen):
    [choice] = seen["text"]["choices"]

    assert seen["text"]["model"] == "gpt-x"
    assert choice["message"]["content"] == "Grüße"
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"][0]["logprob"] == -0.5
    assert seen["text"]["usage"]["total_tokens"] == 10
    assert seen["text"]["usage"]["prompt_tokens_details"]["cached_tokens"] == 5


def test_tool_calls_and_reasoning_parse(seen):
    [choice] = seen["tools"]["choices"]

    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "hm"
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"arguments": '{"a":2}', "name": "calc"},
        {"arguments": "3", "name": "calc"},
    ]


def test_the_streaming_helper_puts_the_same_message_together(seen):
    streamed = seen["stream"]["final"]["choices"][0]
    plain = seen["tools"]["choices"][0]

    assert streamed["finish_reason"] == plain["finish_reason"]
    assert streamed["message"]["reasoning_content"] == "hm"
    for call, other in zip(streamed["message"]["tool_calls"], plain["message"]["tool_calls"], strict=True):
        assert call["id"] == other["id"]
        assert {key: call["function"][key] for key in ("name", "arguments")} == other["function"]
    assert seen["stream"]["final"]["usage"]["total_tokens"] == 10
    assert "tool_calls.function.arguments.done" in seen["stream"]["kinds"]


def test_a_plain_stream_is_one_chunk_with_everything(seen):
    [chunk] = seen["chunks"]

    assert chunk["choices"][0]["delta"]["content"] == "Grüße"
    assert chunk["choices"][0]["finish_reason"] == "stop"
    assert chunk["usage"]["completion_tokens"] == 3
    assert seen["async"] == ["Grüße"]


def test_a_message_object_sent_back_is_the_message_that_was_given(seen, directory):
    assert seen["conversation"]
    first, second = directory.sessions["talk"].calls

    assert second.request.messages[0] == first.request.messages[0]
    assert second.request.messages[1] == make_tool_message(reasoning_content="hm")
    assert second.request.messages[2] == Message(role="tool", content="4", tool_call_id="call_1")
    assert second.request.tools == first.request.tools


def test_models_are_listed(seen):
    assert seen["models"] == ["demo"]


def test_an_ended_session_is_not_retried(seen, directory):
    assert seen["unknown"]["type"] == "NotFoundError"
    assert seen["unknown"]["code"] == "session_discarded"
    assert directory.lookups["unknown"] == 1


def test_a_bad_request_names_its_field(seen):
    assert seen["bad"]["type"] == "BadRequestError"
    assert (seen["bad"]["param"], seen["bad"]["code"]) == ("n", "unsupported_feature")


@pytest.mark.parametrize("kind", ["full", "full_stream"])
def test_a_full_context_is_what_harnesses_look_for(seen, kind):
    assert seen[kind]["type"] == "BadRequestError"
    assert seen[kind]["code"] == "context_length_exceeded"
    assert "maximum context length is 64 tokens" in seen[kind]["message"]


def test_an_internal_error_is_not_retried(seen, directory):
    assert seen["failed"]["type"] == "InternalServerError"
    assert seen["failed_stream"]["type"] == "APIError"
    assert seen["failed_stream"]["message"] == "the engine failed r1"
    assert directory.lookups["failed"] == 2


def test_text_completions_say_what_to_use(seen):
    assert seen["no_completions"]["status"] == 404
    assert "/v1/chat/completions" in seen["no_completions"]["message"]


def test_every_reply_counts_as_delivered(seen, directory):
    ends = [end for session in directory.sessions.values() for end in session.ends]

    assert {how for how, _ in ends} == {"delivered"}
    assert all(call.n_holds == 0 for session in directory.sessions.values() for call in session.calls)
