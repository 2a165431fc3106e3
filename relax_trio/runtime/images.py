"""The images that a Session's requests hold, each read once: an agent sends its whole history again every turn."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from relax_trio.backend.fetch import fetch_image
from relax_trio.data.image import EncodedImage
from relax_trio.data.messages import Message
from relax_trio.errors import InvalidRequest
from relax_trio.sync.cpu import CpuPool
from relax_trio.tokens.pads import image_urls
from relax_trio.tokens.vision import Vision


@define(eq=False)
class Images:
    """Images of one Session by the URL they came under. Whatever changes behind a URL, a Session sees one image."""

    _known: dict[str, EncodedImage] = field(factory=dict)

    async def of(self, messages: Sequence[Message], vision: Vision, cpu: CpuPool) -> tuple[EncodedImage, ...]:
        """The images of `messages`, in order.

        Raises:
          InvalidRequest: one of them can't be served; says why.

        Cancellation: safe.
        """
        urls = image_urls(messages)
        for number, url in enumerate(urls, 1):
            if url in self._known:
                continue
            try:
                is_remote = vision.pads is not None and url.startswith(("http:", "https:"))
                read = await fetch_image(url) if is_remote else url
                self._known[url] = await cpu.run(vision.encode, read)
            except InvalidRequest as exc:
                raise type(exc)(f"image {number} of the newest {len(messages)} messages: {exc.message}") from exc
        return tuple(self._known[url] for url in urls)
