"""One conversation through the three APIs: the same canonical messages, state hashes and tokens."""

from __future__ import annotations

import json

import pytest
from attrs import define, field
from builders_runtime import open_codec_session

from relax_trio.api.anthropic import MESSAGES
from relax_trio.api.chat import CHAT
from relax_trio.api.responses import RESPONSES

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "x", "a": 1.0}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": 3}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"value": 3}}\n</tool_call>'
)
TURNS = (
    f"<think>\nhm, über\n</think>\n\nlet me see\n{CALLS}",
    "<think>\nso\n</think>\n\nthe answer is 42",
    f"<think>\nagain\n</think>\n\n{CALLS}",
    "bye",
)


@define
class ChatClient:
    """Keeps a conversation as clients of Chat Completions do."""

    dialect = CHAT
    history: list = field(factory=lambda: [{"role": "system", "content": "be kind"}])

    def say(self, text):
        self.history.append({"role": "user", "content": text})

    def take(self, reply):
        message = reply["choices"][0]["message"]
        self.history.append(message)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "" if i else "seen"}
            for i, call in enumerate(message.get("tool_calls", ()))
        ]
        self.history += results

    def body(self):
        tool = {"name": "look", "description": "Look.", "parameters": SCHEMA}
        thinking = {"enable_thinking": True}
        return {
            "messages": self.history,
            "tools": [{"type": "function", "function": tool}],
            "chat_template_kwargs": thinking,
        }


@define
class ResponsesClient:
    """Keeps a conversation as clients of Responses do."""

    dialect = RESPONSES
    history: list = field(factory=list)

    def say(self, text):
        self.history.append({"role": "user", "content": [{"type": "input_text", "text": text}]})

    def take(self, reply):
        self.history += reply["output"]
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        self.history += [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "" if i else "seen"}
            for i, call in enumerate(calls)
        ]

    def body(self):
        tool = {"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA}
        return {
            "instructions": "be kind",
            "input": self.history,
            "tools": [tool],
            "reasoning": {"effort": "medium"},
        }


@define
class MessagesClient:
    """Keeps a conversation as clients of Messages do."""

    dialect = MESSAGES
    history: list = field(factory=list)

    def say(self, text):
        self.history.append({"role": "user", "content": text})

    def take(self, reply):
        self.history.append({"role": "assistant", "content": reply["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": None if i else "seen"}
            for i, block in enumerate(b for b in reply["content"] if b["type"] == "tool_use")
        ]
        if results:
            self.history.append({"role": "user", "content": results})

    def body(self):
        tool = {"name": "look", "description": "Look.", "input_schema": SCHEMA}
        return {
            "system": [{"type": "text", "text": "be kind"}],
            "messages": self.history,
            "tools": [tool],
            "thinking": {"type": "adaptive"},
            "max_tokens": 200,
        }


async def converse(client, session):
    """Four turns: a question with tool calls and its answer, twice."""
    for text in ("hello", None, "how are you", None):
        if text is not None:
            client.say(text)
        body = json.loads(json.dumps(client.body()))
        parsed = client.dialect.parse(
            body, digest=b"", retry=False, template_variables=session.shared.codec.template.variables
        )
        counted = await session.count_tokens(parsed.request)
        call = session.submit(parsed.request)
        completion = await call.wait_done()
        call.delivered()
        assert completion.usage.prompt_tokens == counted
        client.take(json.loads(json.dumps(client.dialect.render(completion, parsed, name="G0-0-r1"))))


async def record(client_class):
    """The forest of one conversation: for each node what it is, its state, its tokens and its messages."""
    async with open_codec_session(TURNS) as session:
        await converse(client_class(), session)
        assert len(session.forest.leaves()) == len(session.forest.root.children) == 1
        return [
            (node.kind, node.state.hex(), node.token_ids.tolist(), node.messages) for node in session.forest.nodes[1:]
        ]


@pytest.mark.parametrize("other", [ResponsesClient, MessagesClient])
async def test_one_conversation_is_one_state_and_one_token_sequence_in_every_api(autojump_clock, other):
    by_chat = await record(ChatClient)

    assert await record(other) == by_chat
    assert [kind for kind, *_ in by_chat] == ["observation", "response"] * 4


async def test_the_conversation_holds_what_is_hard_to_keep(autojump_clock):
    """Reasoning, arguments that are no object, an empty result: or the equality above would say little."""
    nodes = await record(ChatClient)
    first, results = nodes[1][3][0], nodes[2][3]

    assert first.reasoning_content == "hm, über"
    assert [call.arguments for call in first.tool_calls] == ['{"a":1,"at":"x"}', "3", '{"value":3}']
    assert [(m.role, m.content) for m in results] == [("tool", "seen"), ("tool", ""), ("tool", "")]
