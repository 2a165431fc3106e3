"""A completion → output items of the Responses API."""

from __future__ import annotations

from relax_trio.api.responses_reasoning import reasoning_item
from relax_trio.api.responses_tools import Tools
from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.messages import ToolCall
from relax_trio.data.request import Completion, TokenLogprob


def output_items(completion: Completion, tools: Tools, *, name: str) -> list[JsonObject]:
    """Reasoning, text and calls of a turn, each where there is one; ids are functions of the call's name.

    A turn without calls has a message, an empty one at least: clients that drop reasoning send it back.
    """
    message = completion.message
    status = "incomplete" if completion.finish == "length" else "completed"
    items: list[JsonObject] = []
    if message.reasoning_content is not None:
        reasoned = "completed" if message.content or message.tool_calls else status
        items.append(reasoning_item(message.reasoning_content, item_id=f"rs_{name}", status=reasoned))
    if message.content or not message.tool_calls:
        text = message.content if isinstance(message.content, str) else ""
        items.append(_message(text, completion.logprobs, item_id=f"msg_{name}", status=status))
    for index, call in enumerate(message.tool_calls):
        items.append(_function_call(call, tools, item_id=f"fc_{name}-{index}"))
    return items


def _message(text: str, logprobs: tuple[TokenLogprob, ...] | None, *, item_id: str, status: str) -> JsonObject:
    entries: list[JsonValue] = [_logprob(one) for one in logprobs or ()]
    part: JsonObject = {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": [part]}


def _function_call(call: ToolCall, tools: Tools, *, item_id: str) -> JsonObject:
    namespace, name = tools.client_name(call.name)
    item: JsonObject = {
        "id": item_id,
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": name,
        "arguments": call.arguments,
    }
    return item if namespace is None else {**item, "namespace": namespace}


def _logprob(one: TokenLogprob) -> JsonObject:
    """One token of the turn. Its bytes are unknown where it ends inside a character and its text is a replacement."""
    whole = "\ufffd" not in one.token
    return {
        "token": one.token,
        "logprob": one.logprob,
        "bytes": list(one.token.encode()) if whole else [],
        "top_logprobs": [],
        "token_id": one.token_id,
    }
