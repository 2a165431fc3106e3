"""A completion as a Messages reply: content blocks, stop reason, usage, and the same as events of a stream."""

from __future__ import annotations

from collections.abc import Iterator

from relax_trio.api.anthropic_arguments import call_to_client
from relax_trio.api.dialect import ParsedRequest, reply_bytes, sse_data
from relax_trio.api.sealed import seal
from relax_trio.data.json import JsonObject
from relax_trio.data.messages import Message
from relax_trio.data.request import Completion, Usage


def message_json(completion: Completion, parsed: ParsedRequest, *, name: str) -> JsonObject:
    """The whole reply."""
    stop_reason, stop_sequence = _stop(completion, parsed)
    return {
        **_opened(completion, parsed, name),
        "content": [*_blocks(completion.message, parsed.request.prefill)],
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": _usage(completion.usage),
    }


def message_events(completion: Completion, parsed: ParsedRequest, *, name: str) -> bytes:
    """The whole reply as events: one start, one stop and whole deltas for each block."""
    frames = [_event({"type": "message_start", "message": _opened(completion, parsed, name)})]
    for index, block in enumerate(_blocks(completion.message, parsed.request.prefill)):
        start, deltas = _streamed(block)
        frames.append(_event({"type": "content_block_start", "index": index, "content_block": start}))
        frames += [_event({"type": "content_block_delta", "index": index, "delta": delta}) for delta in deltas]
        frames.append(_event({"type": "content_block_stop", "index": index}))
    stop_reason, stop_sequence = _stop(completion, parsed)
    ended: JsonObject = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
    frames.append(_event({"type": "message_delta", "delta": ended, "usage": _usage(completion.usage)}))
    frames.append(_event({"type": "message_stop"}))
    return b"".join(frames)


def ping() -> bytes:
    """The event that keeps a stream alive; clients skip it, wherever it comes."""
    return _event({"type": "ping"})


def _event(data: JsonObject) -> bytes:
    return sse_data(data, event=str(data["type"]))


def _opened(completion: Completion, parsed: ParsedRequest, name: str) -> JsonObject:
    """The message before anything of it was said."""
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": parsed.request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**_usage(completion.usage), "output_tokens": 0},
    }


def _blocks(message: Message, prefill: str) -> Iterator[JsonObject]:
    """Thinking, text, calls. A message without text and calls has an empty text: clients look for one.

    What the client began the turn with is not said again.
    """
    if message.reasoning_content is not None:
        reasoning = message.reasoning_content
        yield {"type": "thinking", "thinking": reasoning, "signature": seal(reasoning)}
    if message.content or not message.tool_calls:
        yield {"type": "text", "text": str(message.content or "").removeprefix(prefill)}
    for call in message.tool_calls:
        call_id, given = call_to_client(call)
        yield {"type": "tool_use", "id": call_id, "name": call.name, "input": given}


def _streamed(block: JsonObject) -> tuple[JsonObject, list[JsonObject]]:
    """A block as it opens, and the deltas that fill it."""
    if block["type"] == "thinking":
        return {**block, "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    given = block["input"]
    assert isinstance(given, dict), "an input is an object"
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": reply_bytes(given).decode()}]


def _stop(completion: Completion, parsed: ParsedRequest) -> tuple[str, str | None]:
    """Stop reason and stop sequence. A stop string of the run, which the client did not ask for, ends the turn."""
    if completion.finish == "tool_calls":
        return "tool_use", None
    if completion.finish == "length":
        return "max_tokens", None
    if completion.stop_sequence is not None and completion.stop_sequence in parsed.request.stop:
        return "stop_sequence", completion.stop_sequence
    return "end_turn", None


def _usage(usage: Usage) -> JsonObject:
    """Counts in Anthropic's way: the prompt is the sum of the three input counts."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
