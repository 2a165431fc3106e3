"""The official OpenAI SDK's Responses client against the real server, in a process of its own on the real clock."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import trio
from builders_api import OPERATOR, FakeDirectory, FakeSession, make_completion

from relax_trio.api.app import make_app
from relax_trio.api.serve import ApiServer
from relax_trio.config.tree import ServerConfig
from relax_trio.data.messages import Message, ToolCall
from relax_trio.data.request import TokenLogprob
from relax_trio.errors import ContextLengthExceeded, InternalError
from relax_trio.sync.cpu import ThreadCpuPool

CLIENT = Path(__file__).parent / "openai_responses_client.py"
KEPT = ("as_objects", "as_dumps", "as_codex", "as_events")
TOOL_TURN = Message(
    role="assistant",
    content="let me see",
    reasoning_content="hm",
    tool_calls=(
        ToolCall(id="call_1", name="calc", arguments='{"a":2}'),
        ToolCall(id="call_2", name="list", arguments='{"a":3}'),
    ),
)
pytestmark = pytest.mark.process


def make_directory() -> FakeDirectory:
    logprobs = (TokenLogprob(token="Grüße", token_id=5, logprob=-0.5),)
    turn = make_completion(TOOL_TURN, finish="tool_calls")
    answers = {
        "text": make_completion(logprobs=logprobs),
        "tools": turn,
        "cut": make_completion(Message(role="assistant", reasoning_content="hm"), finish="length"),
        "json": make_completion(Message(role="assistant", content='{"answer": 4}')),
        "failed": InternalError("the engine failed r1"),
        **dict.fromkeys((*KEPT, "as_ids"), turn),
    }
    sessions = {credential: FakeSession(answer=answer) for credential, answer in answers.items()}
    sessions["full"] = FakeSession(refusal=ContextLengthExceeded(n_prompt=99, max_context_len=64))
    return FakeDirectory(sessions)


async def run_client(directory: FakeDirectory) -> dict:
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


def test_a_reply_passes_the_typed_models_with_every_check_on(seen):
    [message] = seen["text"]["output"]

    assert (seen["text"]["model"], seen["text"]["status"], seen["text"]["instructions"]) == (
        "gpt-x",
        "completed",
        "terse",
    )
    assert message["content"][0]["text"] == seen["output_text"] == "Grüße"
    assert message["content"][0]["logprobs"][0]["logprob"] == -0.5
    assert seen["text"]["usage"]["total_tokens"] == 10
    assert seen["text"]["usage"]["input_tokens_details"]["cached_tokens"] == 5


def test_reasoning_and_calls_pass_them_too(seen):
    reasoning, message, calc, listing = seen["tools"]["output"]

    assert reasoning["summary"][0]["text"] == reasoning["content"][0]["text"] == "hm"
    assert message["content"][0]["text"] == "let me see"
    assert (calc["call_id"], calc["name"], calc["namespace"], calc["arguments"]) == ("call_1", "calc", None, '{"a":2}')
    assert (listing["name"], listing["namespace"]) == ("list", "files")


def test_a_cut_turn_is_incomplete_and_says_why(seen):
    assert (seen["cut"]["status"], seen["cut"]["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert seen["cut_stream"][-1] == "response.incomplete"


def test_every_event_passes_its_typed_model_with_every_check_on(seen):
    assert seen["strict_events"][0] == "response.created"
    assert seen["strict_events"][-1] == "response.completed"
    assert seen["strict_events"].count("response.output_item.done") == 4
    assert seen["strict_failure"] == ["response.created", "error", "response.failed"]


def test_the_streaming_helper_puts_the_same_response_together(seen):
    final = seen["tool_stream"]["final"]

    for plain, item in zip(seen["tools"]["output"], final["output"], strict=True):
        assert {key: item[key] for key in plain} | {"content": None} == plain | {"content": None}
    assert final["output"][2]["parsed_arguments"] == {"a": 2}
    assert final["usage"] == seen["tools"]["usage"]
    assert seen["tool_stream"]["snapshots"] == ["let me see", '{"a":2}', '{"a":3}']
    assert seen["stream"]["snapshots"] == ["Grüße"]
    assert seen["async"] == "Grüße"


def test_structured_output_is_read_by_the_helpers(seen):
    assert seen["parsed"] == [4, 4]


@pytest.mark.parametrize("keep", KEPT)
def test_items_sent_back_are_the_turn_that_was_given(seen, directory, keep):
    assert seen
    first, second = directory.sessions[keep].calls

    assert second.request.messages == (
        *first.request.messages,
        TOOL_TURN,
        Message(role="tool", content="4", tool_call_id="call_1"),
        Message(role="tool", content="4", tool_call_id="call_2"),
    )
    assert second.request.tools == first.request.tools


def test_reasoning_sent_back_by_id_alone_is_a_turn_without_it(seen, directory):
    assert seen
    [_, second] = directory.sessions["as_ids"].calls

    assert second.request.messages[1] == Message(
        role="assistant", content="let me see", tool_calls=TOOL_TURN.tool_calls
    )


def test_errors_are_the_sdks_own(seen):
    assert (seen["unknown"]["type"], seen["unknown"]["code"]) == ("NotFoundError", "session_discarded")
    assert (seen["previous"]["type"], seen["previous"]["param"]) == ("BadRequestError", "previous_response_id")
    assert "complete input" in seen["previous"]["message"]
    assert seen["failed"]["type"] == "InternalServerError"
    assert (seen["failed_stream"]["type"], seen["failed_stream"]["message"]) == ("APIError", "the engine failed r1")
    for kind in ("full", "full_stream"):
        assert (seen[kind]["type"], seen[kind]["code"]) == ("BadRequestError", "context_length_exceeded")
        assert "maximum context length is 64 tokens" in seen[kind]["message"]


def test_every_reply_counts_as_delivered(seen, directory):
    assert seen
    ends = [end for session in directory.sessions.values() for end in session.ends]

    assert {how for how, _ in ends} == {"delivered"}
