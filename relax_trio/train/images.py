"""Images of training rows as inputs of the model: pixels, grids and which tokens stand for them.

The processor's own inputs of the very images that the engine was sent. Not covered: models of other kinds, whose rows
hold no images.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from relax_trio.data.image import EncodedImage
from relax_trio.errors import TrainError
from relax_trio.tokens.hf import load_tokenizer
from relax_trio.tokens.vision import QwenVision, has_vision, load_vision


@frozen(eq=False)
class ImageInputs:
    """How the images of a batch enter a vision-language model."""

    vision: QwenVision

    @property
    def forbidden_ids(self) -> tuple[int, ...]:
        """Tokens that rollout never generates, so that its logprobs are of the distribution without them."""
        return self.vision.pads.ids

    def of(self, ids: torch.Tensor, images: Sequence[Sequence[EncodedImage]]) -> dict[str, Any]:
        """Keyword arguments of a forward pass over `ids`; none where no row has an image.

        Args:
          ids: (B, T) int64, what the model is given.
          images: of each of the B rows; those behind its last token are passed over.

        Raises:
          TrainError: the placeholders of a row are not those of its images.
        """
        is_pad = ids == self.vision.pads.image_id  # (B, T)
        seen = [_seen(row, pads.nonzero()[:, 0].tolist()) for row, pads in zip(images, is_pad, strict=True)]
        flat = list(chain.from_iterable(seen))
        if not flat:
            return {}
        made = self.vision.inputs(flat)
        return {
            "pixel_values": made["pixel_values"].to(ids.device),
            "image_grid_thw": made["image_grid_thw"].to(ids.device),
            "mm_token_type_ids": is_pad.int(),
        }


def open_images(checkpoint: Path) -> ImageInputs | None:
    """How images enter the model of a checkpoint; None where it takes none, or none that are served.

    Raises:
      ConfigError: its files can't be read.
    """
    if not has_vision(checkpoint):
        return None
    vision = load_vision(checkpoint, load_tokenizer(checkpoint))
    return ImageInputs(vision) if isinstance(vision, QwenVision) else None


def _seen(images: Sequence[EncodedImage], places: Sequence[int]) -> list[EncodedImage]:
    """The first images: those that the placeholders of a row, at `places`, stand for."""
    seen: list[EncodedImage] = []
    at = 0
    for image in images:
        run = places[at : at + image.n_tokens]
        if len(run) < image.n_tokens or run[-1] - run[0] >= image.n_tokens:
            break
        seen.append(image)
        at += image.n_tokens
    if at < len(places):
        raise TrainError(
            f"a row with {len(images)} images has placeholders of others: {len(places) - at} of {len(places)} are left "
            "over"
        )
    return seen
