"""Training rows and messages as JSON and back, exactly: every token, logprob and text survives the round trip.

The names are those of `Sample`. Not covered: files (dump.py).
"""

from __future__ import annotations

from array import array
from typing import Any, cast

from relax_trio.data.image import EncodedImage
from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.messages import Content, ImagePart, Message, Part, Role, TextPart, ToolCall
from relax_trio.data.record import Reward
from relax_trio.data.sample import Sample, VersionSpan
from relax_trio.ids import GroupId, PlaceId, WeightVersion


def sample_to_json(sample: Sample) -> JsonObject:
    """Give a row as plain JSON: arrays as lists of numbers, versions as `{"version", "n_tokens"}` in order."""
    return {
        "place": sample.place,
        "group": sample.group,
        "name": sample.name,
        "index": sample.index,
        "group_index": sample.group_index,
        "row": sample.row,
        "status": sample.status,
        "reward": sample.reward,
        "advantage": list(sample.advantage) if isinstance(sample.advantage, tuple) else sample.advantage,
        "label": sample.label,
        "metadata": sample.metadata,
        "output_metadata": sample.output_metadata,
        "train_metadata": sample.train_metadata,
        "prompt": sample.prompt,
        "response": sample.response,
        "messages": [message_to_json(message) for message in sample.messages],
        "images": [{"url": image.url, "n_tokens": image.n_tokens} for image in sample.images],
        "turn_lens": list(sample.turn_lens),
        "turn_starts": list(sample.turn_starts),
        "weight_versions": [{"version": span.version, "n_tokens": span.n_tokens} for span in sample.weight_versions],
        "response_length": sample.response_length,
        "tokens": cast("list[JsonValue]", sample.tokens.tolist()),
        "loss_mask": list(sample.loss_mask),
        "rollout_log_probs": cast("list[JsonValue]", sample.rollout_log_probs.tolist()),
    }


def sample_from_json(value: JsonObject) -> Sample:
    """Make the row that `sample_to_json` gave.

    Raises:
      KeyError, TypeError, ValueError: `value` is no such object.
    """
    fields = cast("dict[str, Any]", value)
    return Sample(
        prompt=fields["prompt"],
        response=fields["response"],
        label=fields["label"],
        tokens=array("i", fields["tokens"]),
        response_length=fields["response_length"],
        loss_mask=bytearray(fields["loss_mask"]),
        rollout_log_probs=array("d", fields["rollout_log_probs"]),
        reward=cast("Reward", fields["reward"]),
        metadata=fields["metadata"],
        output_metadata=fields["output_metadata"],
        train_metadata=fields["train_metadata"],
        index=fields["index"],
        group_index=fields["group_index"],
        status=fields["status"],
        weight_versions=tuple(
            VersionSpan(version=WeightVersion(span["version"]), n_tokens=span["n_tokens"])
            for span in fields["weight_versions"]
        ),
        place=PlaceId(fields["place"]),
        group=GroupId(fields["group"]),
        name=fields["name"],
        row=fields["row"],
        messages=tuple(message_from_json(message) for message in fields["messages"]),
        turn_lens=tuple(fields["turn_lens"]),
        turn_starts=tuple(fields["turn_starts"]),
        advantage=_credit(fields["advantage"]),
        images=tuple(EncodedImage(url=image["url"], n_tokens=image["n_tokens"]) for image in fields.get("images", ())),
    )


def message_to_json(message: Message) -> JsonObject:
    """Give a message in the Chat shape; content that is absent is written as null."""
    out = message.to_chat()
    if message.content is None:
        out["content"] = None
    return out


def message_from_json(value: JsonObject) -> Message:
    """Make the message that `message_to_json` gave.

    Raises:
      KeyError, TypeError: `value` is no such object.
    """
    fields = cast("dict[str, Any]", value)
    return Message(
        role=cast("Role", fields["role"]),
        content=_content(fields["content"]),
        reasoning_content=fields.get("reasoning_content"),
        tool_calls=tuple(
            ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in fields.get("tool_calls", ())
        ),
        tool_call_id=fields.get("tool_call_id"),
    )


def _content(value: Any) -> Content:
    if value is None or isinstance(value, str):
        return value
    return tuple(_part(part) for part in value)


def _part(part: dict[str, Any]) -> Part:
    return TextPart(part["text"]) if part["type"] == "text" else ImagePart(part["image_url"]["url"])


def _credit(value: Any) -> float | tuple[float, ...] | None:
    return tuple(value) if isinstance(value, list) else cast("float | None", value)
