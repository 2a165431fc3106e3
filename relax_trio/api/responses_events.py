"""The event sequence of a streamed Responses reply, all of it at once: the shortest in which every helper of the
official SDKs and the command-line clients finds what it waits for.
"""

from __future__ import annotations

from typing import cast

from attrs import define, field

from relax_trio.api.dialect import sse_data
from relax_trio.data.json import JsonObject


@define
class EventWriter:
    """Writes numbered events of one reply."""

    _frames: list[bytes] = field(factory=list)

    def add(self, kind: str, **fields: object) -> None:
        """Append one event; its number is its place in the stream, from 0."""
        event = cast("JsonObject", {"type": kind, "sequence_number": len(self._frames), **fields})
        self._frames.append(sse_data(event, event=kind))

    def to_bytes(self) -> bytes:
        """All frames."""
        return b"".join(self._frames)


def reply_events(started: JsonObject, finished: JsonObject, items: list[JsonObject]) -> bytes:
    """The frames of a finished turn.

    Args:
      started, finished: the response object as it begins and as it ends; the latter's status names the last event.
      items: the output items of `finished`.
    """
    events = EventWriter()
    events.add("response.created", response=started)
    events.add("response.in_progress", response=started)
    for index, item in enumerate(items):
        _add_item(events, item, index)
    events.add(f"response.{finished['status']}", response=finished)
    return events.to_bytes()


def failure_events(started: JsonObject, failed: JsonObject, error: JsonObject) -> bytes:
    """The frames of a failed turn.

    The `error` event comes first: it is what makes SDKs raise. Clients that know the response's own events end with
    `response.failed`.

    Args:
      error: message, type, param and code, as the JSON envelope has them.
    """
    events = EventWriter()
    events.add("response.created", response=started)
    flat = {key: error[key] for key in ("code", "message", "param")}
    events.add("error", **flat, error=error)
    events.add("response.failed", response=failed)
    return events.to_bytes()


def _add_item(events: EventWriter, item: JsonObject, index: int) -> None:
    kind = item["type"]
    if kind == "reasoning":
        _add_reasoning(events, item, index)
    elif kind == "message":
        _add_message(events, item, index)
    else:
        _add_call(events, item, index)
    events.add("response.output_item.done", output_index=index, item=item)


def _add_reasoning(events: EventWriter, item: JsonObject, index: int) -> None:
    """The reasoning as summary and as content: there are clients that put together the one, and those of the other."""
    begun = {"id": item["id"], "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
    events.add("response.output_item.added", output_index=index, item=begun)
    for at, part in enumerate(cast("list[JsonObject]", item["summary"])):
        where = {"item_id": item["id"], "output_index": index, "summary_index": at}
        events.add("response.reasoning_summary_part.added", **where, part={**part, "text": ""})
        events.add("response.reasoning_summary_text.delta", **where, delta=part["text"])
        events.add("response.reasoning_summary_text.done", **where, text=part["text"])
        events.add("response.reasoning_summary_part.done", **where, part=part)
    for at, part in enumerate(cast("list[JsonObject]", item["content"])):
        where = {"item_id": item["id"], "output_index": index, "content_index": at}
        events.add("response.content_part.added", **where, part={**part, "text": ""})
        events.add("response.reasoning_text.delta", **where, delta=part["text"])
        events.add("response.reasoning_text.done", **where, text=part["text"])
        events.add("response.content_part.done", **where, part=part)


def _add_message(events: EventWriter, item: JsonObject, index: int) -> None:
    begun = {**item, "status": "in_progress", "content": []}
    events.add("response.output_item.added", output_index=index, item=begun)
    for at, part in enumerate(cast("list[JsonObject]", item["content"])):
        where = {"item_id": item["id"], "output_index": index, "content_index": at}
        said = {"logprobs": part["logprobs"]}
        events.add("response.content_part.added", **where, part={**part, "text": "", "logprobs": []})
        if part["text"]:
            events.add("response.output_text.delta", **where, delta=part["text"], **said)
        events.add("response.output_text.done", **where, text=part["text"], **said)
        events.add("response.content_part.done", **where, part=part)


def _add_call(events: EventWriter, item: JsonObject, index: int) -> None:
    where = {"item_id": item["id"], "output_index": index}
    begun = {**item, "status": "in_progress", "arguments": ""}
    events.add("response.output_item.added", output_index=index, item=begun)
    if item["arguments"]:
        events.add("response.function_call_arguments.delta", **where, delta=item["arguments"])
    events.add("response.function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"])
