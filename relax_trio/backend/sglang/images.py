"""What a server is sent of a prompt with images: one placeholder for each, and nothing that it would take for one more.

A server turns the ids of such a prompt into text and looks for placeholders there, before it goes back to the ids. A
prompt with more of them than images is answered with an error at best, and at worst never: it is not sent.

A server also keeps what its vision tower made of an image, and forgets it with no flush and no new weights. So an image
has another name under each version of the weights, and in each run.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Callable, Sequence
from typing import Final

from relax_trio.backend.sglang.stops import Decode
from relax_trio.backend.sglang.wire import Leg, WireImage
from relax_trio.data.image import EncodedImage
from relax_trio.errors import BackendProtocolError, BackendRejected, PromptRefused
from relax_trio.ids import WeightVersion
from relax_trio.tokens.pads import Pads

_OWN_WORD: Final = "<image>"
"""What servers read as a placeholder besides the checkpoint's own."""


class ImagePrompts:
    """Prompts of a checkpoint that may hold images.

    Args:
      pads: its placeholders; None: it takes no images.
      decode: token ids → text, special tokens included.
      version: tells the weights that servers serve now.
    """

    def __init__(self, pads: Pads | None, decode: Decode | None, *, version: Callable[[], WeightVersion]) -> None:
        self._version = version
        self._pads = pads
        self._decode = decode
        self._run_tag = secrets.token_hex(4)

    @property
    def forbidden_ids(self) -> tuple[int, ...]:
        """Tokens that may not be generated: nobody could tell them from images."""
        return () if self._pads is None else self._pads.ids

    def wire_ids(self, token_ids: array[int], images: Sequence[EncodedImage], what: str) -> array[int]:
        """`array('i')` of the prompt as a server wants it. Long for a long prompt: for a worker thread.

        Args:
          token_ids: the prompt with every placeholder that the model reads.
          images: at least one.
          what: names the attempt, for errors.

        Raises:
          BackendRejected: the checkpoint takes no images, or no decoder was given.
          PromptRefused: the text of the prompt holds what the server would take for one more image.
        """
        if self._pads is None or self._decode is None:
            raise BackendRejected(f"{what}: the checkpoint of this backend takes no images")
        ids = self._pads.contract(token_ids, images)
        text = self._decode(ids)
        for word in (_OWN_WORD, *self._pads.texts.values()):
            n_expected = len(images) if word == self._pads.image_text else 0
            if text.count(word) != n_expected:
                raise PromptRefused(
                    f"the conversation holds an image and also the text {word!r}, which SGLang takes for the place of "
                    "another one; write it otherwise"
                )
        return ids

    def wire_images(self, images: Sequence[EncodedImage]) -> list[WireImage]:
        """The images as they are sent now. Long for large ones: for a worker thread."""
        return [WireImage(url=image.url, key=self._key(image)) for image in images]

    def _key(self, image: EncodedImage) -> str:
        return hashlib.sha256(f"{self._run_tag} {self._version()} {image.url}".encode()).hexdigest()[:16]

    def check_answer(self, leg: Leg, n_sent: int | None, what: str) -> None:
        """Check the answer to a prompt.

        Args:
          n_sent: tokens of the prompt, with every placeholder that the model reads; None where it holds no image.

        Raises:
          BackendProtocolError: the server counts otherwise, so it saw other images; or a placeholder was generated.
        """
        if n_sent is not None and leg.prompt_len not in (None, n_sent):  # None: it never looked at the prompt
            raise BackendProtocolError(
                f"{what}: the server read {leg.prompt_len} prompt tokens where {n_sent} were meant; its image "
                "processor is not that of the checkpoint (start it with the same files and no image limits of its own)"
            )
        made = set(self.forbidden_ids).intersection(leg.token_ids)
        if made:
            raise BackendProtocolError(
                f"{what}: generated token {min(made)}, a placeholder of an image, though it was forbidden (logit_bias)"
            )


NO_IMAGES: Final = ImagePrompts(None, None, version=lambda: WeightVersion(""))
