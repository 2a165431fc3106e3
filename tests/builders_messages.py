"""Builders of Messages requests: messages of blocks, and what the dialect reads of them."""

from __future__ import annotations

from relax_trio.api.anthropic import MESSAGES
from relax_trio.data.messages import Message, ToolCall

HI = [{"role": "user", "content": "hi"}]


def parse(messages=HI, *, template_variables=frozenset(), **fields):
    body = {"messages": messages, "max_tokens": 64, **fields}
    return MESSAGES.parse(body, digest=b"d", retry=False, template_variables=template_variables)


def read(*messages, **fields):
    return parse(list(messages), **fields).request.messages


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def text(said, **fields):
    return {"type": "text", "text": said, **fields}


def result(call_id="toolu_1", **fields):
    return {"type": "tool_result", "tool_use_id": call_id, **fields}


def tool_use(given, call_id="toolu_1"):
    return {"type": "tool_use", "id": call_id, "name": "calc", "input": given}


def said(role, content, **fields):
    return Message(role=role, content=content, **fields)


def call_of(arguments, call_id="call_1"):
    return Message(role="assistant", tool_calls=(ToolCall(id=call_id, name="calc", arguments=arguments),))
