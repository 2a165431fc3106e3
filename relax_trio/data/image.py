"""An image of a conversation, made ready once for engine and trainer alike."""

from __future__ import annotations

from attrs import field, frozen


@frozen(kw_only=True)
class EncodedImage:
    """An image as the engine is sent it and as the trainer reads it.

    Attributes:
      url: data: URL of an RGB PNG that has the very size the checkpoint's processor works at, so that whoever
        processes it sees the same pixels.
      n_tokens: placeholder tokens that stand for it in a prompt, training view.
    """

    url: str = field(repr=False)
    n_tokens: int
