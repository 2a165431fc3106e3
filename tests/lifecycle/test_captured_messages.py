"""Requests that Anthropic clients sent, served by a Session with scripted answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders_runtime import open_codec_session

from relax_trio.api.anthropic import MESSAGES

CAPTURES = {
    capture["name"]: capture["body"]
    for capture in json.loads((Path(__file__).parents[1] / "data/wire/messages_requests.json").read_text())
}
REFUSED = {"anthropic-sdk/004": "an image"}
BEGUN = "anthropic-sdk/015"
"""Its last message is the beginning of the turn that it asks for."""

COUNTED = "anthropic-sdk/013"
CONVERSATIONS = [
    ("anthropic-sdk/005", "anthropic-sdk/006"),
    ("anthropic-sdk/008", "anthropic-sdk/009"),
    ("litellm-anthropic/001", "litellm-anthropic/002"),
    ("pydantic-ai-anthropic/001", "pydantic-ai-anthropic/002"),
    ("pydantic-ai-anthropic/003", "pydantic-ai-anthropic/004"),
]


async def ask(session, body):
    parsed = MESSAGES.parse(body, digest=b"", retry=False, template_variables=session.shared.codec.template.variables)
    call = session.submit(parsed.request)
    completion = await call.wait_done()
    call.delivered()
    return MESSAGES.render(completion, parsed, name="G0-0-r1")


def written(blocks):
    """What a model writes to say these blocks."""
    thinking = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    calls = [
        json.dumps({"name": block["name"], "arguments": block["input"]})
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return f"{thinking}</think>" + "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.parametrize("name", [name for name in CAPTURES if name not in REFUSED and name not in (COUNTED, BEGUN)])
async def test_a_captured_request_gets_its_turn(autojump_clock, name):
    async with open_codec_session(["</think>4"]) as session:
        reply = await ask(session, CAPTURES[name])

    assert [block["text"] for block in reply["content"]] == ["4"]
    assert reply["stop_reason"] == "end_turn"


async def test_a_captured_count_is_what_its_message_takes(autojump_clock):
    async with open_codec_session(["</think>4"]) as session:
        counted = await session.count_tokens(MESSAGES.parse_count(CAPTURES[COUNTED]))
        usage = (await ask(session, {**CAPTURES[COUNTED], "max_tokens": 64}))["usage"]

    assert usage["input_tokens"] == counted > 10


async def test_a_turn_that_the_client_began_is_continued_and_only_the_rest_is_said_and_trained(autojump_clock):
    body = CAPTURES[BEGUN]
    async with open_codec_session([" 4.", "</think>hello", " 5."]) as session:
        reply = await ask(session, body)
        assert [block["text"] for block in reply["content"]] == [" 4."]
        plain = await ask(session, {**body, "messages": body["messages"][:1]})
        assert [block["text"] for block in plain["content"]] == ["hello"]
        again = [*body["messages"][:1], {"role": "assistant", "content": "The answer is 4."}]
        await ask(session, {**body, "messages": [*again, {"role": "user", "content": "sure?"}]})

        _, begun, rest, asked, hello, sure, _ = session.forest.nodes
        codec = session.shared.codec
        assert codec.decode(begun.token_ids) == codec.decode(asked.token_ids) + "\n</think>\n\nThe answer is"
        assert codec.decode(rest.token_ids).startswith(" 4.")
        assert rest.messages[0].content == "The answer is 4."
        assert (rest.parent, hello.parent, sure.parent) == (begun, asked, rest)
        assert (begun.messages, begun.prefill, asked.prefill) == (asked.messages, "The answer is", "")


@pytest.mark.parametrize(("first", "second"), CONVERSATIONS)
async def test_a_captured_conversation_is_one_line(autojump_clock, first, second):
    """The model says what the captured server said; the client's next request has it with our ids."""
    body = CAPTURES[second]
    said = body["messages"][1]["content"]
    async with open_codec_session([written(said), "</think>The answer is 4."]) as session:
        reply = await ask(session, CAPTURES[first])
        (call_id,) = (block["id"] for block in reply["content"] if block["type"] == "tool_use")
        theirs = next(block["id"] for block in said if block["type"] == "tool_use")
        await ask(session, json.loads(json.dumps(body).replace(theirs, call_id)))

        assert [node.kind for node in session.forest.nodes] == ["root", *["observation", "response"] * 2]
        assert len(session.forest.leaves()) == len(session.forest.root.children) == 1
