"""A codec without a model: tokens are UTF-8 bytes plus one, and 0 ends a turn. Not covered: tools, reasoning, media."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import cast

from relax_trio.data.image import EncodedImage
from relax_trio.data.json import JsonObject
from relax_trio.data.messages import Message
from relax_trio.ids import StateHash
from relax_trio.tokens.codec import ChatCodec, ParsedTurn
from relax_trio.tokens.vision import NoVision

STOP = 0
"""The token that ends a turn."""


class ByteCodec:
    """What the runtime uses of `ChatCodec`, over a template of `<role>content` one after another."""

    stop_token_ids = (STOP,)
    vision = NoVision()

    def encode_text(self, text: str) -> list[int]:
        """See `ChatCodec`."""
        return [byte + 1 for byte in text.encode()]

    def encode_opening(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonObject],
        chat_template_kwargs: JsonObject,
        *,
        images: Sequence[EncodedImage] = (),
    ) -> array[int]:
        """See `ChatCodec`."""
        text = "".join(f"<{message.role}>{message.content}" for message in messages)
        return array("i", self.encode_text(f"{text}<assistant>"))

    def encode_observation(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonObject],
        chat_template_kwargs: JsonObject,
        *,
        turn: Message,
        turn_ids: Sequence[int],
        earlier: Sequence[Message] = (),
        images: Sequence[EncodedImage] = (),
    ) -> array[int]:
        """See `ChatCodec`."""
        ids = self.encode_opening(messages, tools, chat_template_kwargs)
        return ids if turn_ids and turn_ids[-1] == STOP else array("i", [STOP]) + ids

    def encode_prefill(self, prefill: str, chat_template_kwargs: JsonObject) -> array[int]:
        """See `ChatCodec`."""
        return array("i", self.encode_text(prefill))

    def decode(self, token_ids: Iterable[int]) -> str:
        """See `ChatCodec`; ends of turns are left out."""
        return bytes(token_id - 1 for token_id in token_ids if token_id != STOP).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """See `ChatCodec`."""
        return self.decode([token_id])

    def read_turn(
        self,
        token_ids: Sequence[int],
        *,
        prefill: str = "",
        stopped: bool,
        tools: Sequence[JsonObject],
        state: StateHash,
        stop_string: str | None,
        chat_template_kwargs: JsonObject | None = None,
    ) -> ParsedTurn:
        """See `ChatCodec`."""
        text = self.decode(token_ids)
        text = text.partition(stop_string)[0] if stop_string else text
        message = Message(role="assistant", content=prefill + text)
        return ParsedTurn(message=message, finish="stop" if stopped else "length")


def byte_codec() -> ChatCodec:
    """A `ByteCodec` in the place of a `ChatCodec`, which no Protocol stands for: one class makes it for real."""
    return cast("ChatCodec", ByteCodec())


def turn(text: str) -> list[int]:
    """Token ids of a whole turn that says `text`, for `FakeBackend`."""
    return [*ByteCodec().encode_text(text), STOP]


def prompt_text(token_ids: Sequence[int]) -> str:
    """The conversation that an attempt was sent, as text: `<user>What is 1 + 1?<assistant>`."""
    return ByteCodec().decode(token_ids)
