"""Requests that real clients sent, as captured (tests/data/wire), and the conversations among them."""

from __future__ import annotations

import json
from pathlib import Path

from attrs import frozen

from relax_trio.api.anthropic import MESSAGES
from relax_trio.api.chat import CHAT
from relax_trio.api.responses import RESPONSES
from relax_trio.data.messages import Message

DIALECTS = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}
_FILES = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages", "other": ""}
_VARIABLES = frozenset({"enable_thinking"})


@frozen(kw_only=True)
class Capture:
    """One request of a client, e.g. "openai-sdk/007"; `body` is None where it had none."""

    name: str
    method: str
    path: str
    body: dict | None

    @property
    def client(self) -> str:
        return self.name.partition("/")[0]

    def canonical(self):
        """The canonical request that its dialect makes of the body."""
        return DIALECTS[self.path].parse(self.body, digest=b"", retry=False, template_variables=_VARIABLES).request


def load_captures() -> dict[str, Capture]:
    """All captures by name."""
    found = {}
    for file, path in _FILES.items():
        for raw in json.loads((Path(__file__).parent / f"data/wire/{file}_requests.json").read_text()):
            found[raw["name"]] = Capture(
                name=raw["name"], method=raw.get("method", "POST"), path=raw.get("path", path), body=raw["body"]
            )
    return found


CAPTURES = load_captures()

CONVERSATIONS = [
    ("litellm-hosted_vllm/001", "litellm-hosted_vllm/002"),
    ("litellm-openai/001", "litellm-openai/002"),
    ("openai-agents-chat/001", "openai-agents-chat/002"),
    ("openai-agents-chat/003", "openai-agents-chat/004"),
    ("openai-sdk-reasoning/001", "openai-sdk-reasoning/002"),
    ("openai-sdk/006", "openai-sdk/007"),
    ("openai-sdk/006", "openai-sdk/008"),
    ("pydantic-ai-chat/001", "pydantic-ai-chat/002"),
    ("pydantic-ai-chat/003", "pydantic-ai-chat/004"),
    ("pydantic-ai-responses/001", "pydantic-ai-responses/002"),
    ("pydantic-ai-responses/003", "pydantic-ai-responses/004"),
    ("anthropic-sdk/005", "anthropic-sdk/006"),
    ("anthropic-sdk/005", "anthropic-sdk/007"),
    ("anthropic-sdk/008", "anthropic-sdk/009"),
    ("litellm-anthropic/001", "litellm-anthropic/002"),
    ("pydantic-ai-anthropic/001", "pydantic-ai-anthropic/002"),
    ("pydantic-ai-anthropic/003", "pydantic-ai-anthropic/004"),
]
"""Pairs of captures of which the second goes on where the first was answered."""

REWRITTEN = [("smolagents-tool/001", "smolagents-tool/002"), ("smolagents-tool/003", "smolagents-tool/004")]
"""Pairs of which the second tells the answer of the first, a call, in words of the client's."""


def said(first: Capture, second: Capture) -> Message:
    """What the assistant said in between, by the account of the second request."""
    before, after = first.canonical().messages, second.canonical().messages
    assert after[: len(before)] == before, "the second goes on where the first was"
    return after[len(before)]


def written(message: Message) -> str:
    """What a model writes to say `message`, behind a prompt that opened the reasoning."""
    calls = [
        "<tool_call>\n"
        + json.dumps({"name": call.name, "arguments": json.loads(call.arguments)}, ensure_ascii=False)
        + "\n</tool_call>"
        for call in message.tool_calls
    ]
    return f"{message.reasoning_content or ''}</think>{message.content or ''}" + "\n".join(calls)


def with_ids_of(body: dict, theirs: Message, ours: Message) -> dict:
    """`body`, its calls named as the server named them."""
    text = json.dumps(body)
    for old, new in zip(theirs.tool_calls, ours.tool_calls, strict=True):
        text = text.replace(json.dumps(old.id), json.dumps(new.id))
    return json.loads(text)
