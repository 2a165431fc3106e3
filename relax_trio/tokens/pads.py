"""Placeholders of images among token ids: one where a template prints an image, as many as the model reads elsewhere.

Recorded prompts hold every placeholder that the model reads (expanded), so that lengths are true. What an engine wants
to be sent is its own business: `contract` gives back one for each image.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from attrs import frozen

from relax_trio.data.image import EncodedImage
from relax_trio.data.json import JsonObject, canonical_json
from relax_trio.data.messages import ImagePart, Message
from relax_trio.errors import EngineFault, InvalidRequest

TEXT_ONLY: Final = "this checkpoint takes no images; send text content only"


@frozen(kw_only=True)
class Pads:
    """Placeholder tokens of a checkpoint.

    Attributes:
      image_id: the token that stands for an image.
      texts: text of each placeholder token by its id, those of images and of videos. No model may generate one of
        them, because then nobody could tell which stand for images.
    """

    image_id: int
    texts: dict[int, str]

    @property
    def ids(self) -> tuple[int, ...]:
        """Every placeholder id."""
        return tuple(self.texts)

    @property
    def image_text(self) -> str:
        """Text of the placeholder of an image."""
        return self.texts[self.image_id]

    def expand(self, ids: Sequence[int], images: Sequence[EncodedImage]) -> array[int]:
        """`array('i')` of an encoded prompt in which each placeholder became as many as its image has.

        Raises:
          InvalidRequest: there are more or fewer placeholders than images, or one of a video.
        """
        found = [token_id for token_id in ids if token_id in self.texts]
        if found != [self.image_id] * len(images):
            raise InvalidRequest(
                f"the chat template prints {len(found)} placeholders for the {len(images)} images of these messages; "
                "send images where this model takes them: in user messages",
                param="messages",
            )
        waiting = iter(images)
        expanded = array("i")
        for token_id in ids:
            expanded.extend([token_id] * (next(waiting).n_tokens if token_id == self.image_id else 1))
        return expanded

    def contract(self, ids: array[int], images: Sequence[EncodedImage]) -> array[int]:
        """`array('i')` of an expanded prompt with one placeholder for each image.

        Raises:
          EngineFault: the placeholders are not those of `images`.
        """
        contracted, at = array("i"), 0
        for image in images:
            try:
                start = ids.index(self.image_id, at)
            except ValueError:
                raise EngineFault(f"{len(images)} images, but the prompt has fewer runs of placeholders") from None
            contracted.extend(ids[at : start + 1])
            at = start + image.n_tokens
            if set(ids[start:at]) != {self.image_id} or at > len(ids):
                raise EngineFault(f"an image of {image.n_tokens} tokens stands at token {start} with fewer")
        rest = ids[at:]
        if any(token_id in self.texts for token_id in rest):
            raise EngineFault(f"the prompt has more placeholders than its {len(images)} images")
        contracted.extend(rest)
        return contracted

    def refuse_written(self, messages: Sequence[Message], tools: Sequence[JsonObject], kwargs: JsonObject) -> None:
        """Refuse texts that would be read as placeholders.

        Raises:
          InvalidRequest: one of them holds the text of a placeholder token.
        """
        for text in (*_texts(messages), *map(canonical_json, tools), canonical_json(kwargs)):
            for written in self.texts.values():
                if written in text:
                    raise InvalidRequest(
                        f"a text holds {written!r}, which stands for an image or a video in this model's prompts; "
                        "write it otherwise, and send images as image parts of a message",
                        param="messages",
                    )


def image_urls(messages: Sequence[Message]) -> tuple[str, ...]:
    """URLs of all images in `messages`, in order."""
    return tuple(
        part.url
        for message in messages
        if isinstance(message.content, tuple)
        for part in message.content
        if isinstance(part, ImagePart)
    )


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        yield from message.texts
        yield message.reasoning_content or ""
        yield from (text for call in message.tool_calls for text in (call.name, call.arguments))
