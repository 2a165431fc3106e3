"""Images of a conversation: read from where a message says they are, and made into what engine and trainer read.

Served are checkpoints with the image processor of Qwen2-VL (Qwen2-VL, Qwen2.5-VL, Qwen3-VL and their like): a
placeholder token for each square of merged patches. Every image is brought to the size the processor works at here,
once, and travels as a PNG of that size: resizing it again changes nothing, so that engine and trainer see the same
pixels however they are built. Not covered: videos, images behind http(s): URLs (fetched before).
"""

from __future__ import annotations

import base64
import binascii
import functools
import io
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote_to_bytes

from attrs import field, frozen
from PIL import Image, ImageOps, UnidentifiedImageError

from relax_trio.data.image import EncodedImage
from relax_trio.data.json import JsonObject, JsonValue, parse_json
from relax_trio.errors import ConfigError, InvalidRequest, UnsupportedFeature, boundary
from relax_trio.tokens.pads import TEXT_ONLY, Pads

MAX_PIXELS: Final = 64_000_000
"""Larger images are refused before they are decoded: a small file can hold a huge one."""

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_REMEMBERED: Final = 64
_PROCESSOR: Final = "Qwen2VLImageProcessor"
_ORIENTATION: Final = 0x0112
"""The EXIF tag of how the camera was held."""

_DECODE_ERRORS: Final = (
    OSError,
    ValueError,
    SyntaxError,
    TypeError,
    IndexError,
    EOFError,
    OverflowError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
"""What Pillow raises over bytes that are no image, or only half of one."""


class Vision(Protocol):
    """What a checkpoint does with images. Methods may be called from worker threads."""

    @property
    def pads(self) -> Pads | None:
        """Its placeholder tokens; None: it takes no images."""
        ...

    def encode(self, url: str) -> EncodedImage:
        """Read the image of a data: URL. Blocking, and long for large ones: for a worker thread.

        Raises:
          InvalidRequest: no image, or one that can't be served; says why.
        """
        ...


@frozen
class NoVision:
    """`Vision` where no image is served; `why` is what who sends one is told."""

    why: str = TEXT_ONLY

    @property
    def pads(self) -> None:
        """None."""
        return None

    def encode(self, url: str) -> EncodedImage:
        """Refuse.

        Raises:
          UnsupportedFeature: always.
        """
        raise UnsupportedFeature(f"it can't be served: {self.why}")


@frozen(kw_only=True, eq=False)
class QwenVision:
    """`Vision` of a checkpoint with Qwen2-VL's image processor.

    Attributes:
      pads: its placeholder tokens.
      patch_len: pixels of a patch's side.
      merge_len: patches of the side of the square that one placeholder stands for.
      min_pixels, max_pixels: bounds of the size that images are brought to.
    """

    pads: Pads
    patch_len: int
    merge_len: int
    min_pixels: int
    max_pixels: int
    _processor: Any = field(repr=False)
    _remembering: Callable[[str], EncodedImage] = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_remembering", functools.lru_cache(maxsize=_REMEMBERED)(self._encode))

    def encode(self, url: str) -> EncodedImage:
        """See `Vision.encode`. The last images are remembered: all Sessions of a Group begin with the same ones."""
        return self._remembering(url)

    def _encode(self, url: str) -> EncodedImage:
        image = self._resized(open_image(read_data_url(url)))
        n_tokens = (image.width // self._unit) * (image.height // self._unit)
        return EncodedImage(url=png_url(image), n_tokens=n_tokens)

    def inputs(self, images: Sequence[EncodedImage]) -> dict[str, Any]:
        """The processor's own `pixel_values` and `image_grid_thw` (torch tensors) of at least one image."""
        opened = [open_image(read_data_url(image.url)) for image in images]
        made = self._processor(images=opened, return_tensors="pt")
        return {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}

    @property
    def _unit(self) -> int:
        """Pixels of the side of the square that one placeholder stands for."""
        return self.patch_len * self.merge_len

    def _resized(self, image: Image.Image) -> Image.Image:
        """The image at the size the processor works at, by the processor's own rule and filter."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        try:
            height, width = smart_resize(
                image.height,
                image.width,
                factor=self._unit,
                min_pixels=self.min_pixels,
                max_pixels=self.max_pixels,
            )
        except ValueError as exc:
            raise InvalidRequest(f"its {image.width}x{image.height} pixels: {exc}") from exc
        return image.resize((width, height), Image.Resampling(self._processor.resample))


# --- images ----------------------------------------------------------------------------------------------------


def read_data_url(url: str) -> bytes:
    """The bytes that a data: URL holds.

    Raises:
      InvalidRequest: it is another URL, or damaged.
    """
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not comma:
        raise InvalidRequest(f"its URL begins with {url[:32]!r}; send the image itself as data:image/png;base64,…")
    if not head.endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return base64.b64decode(unquote_to_bytes(data), validate=False)
    except (binascii.Error, ValueError) as exc:
        raise InvalidRequest(f"its data: URL holds no base64: {exc}") from exc


def open_image(data: bytes) -> Image.Image:
    """Decode an image file as RGB, turned the way it was taken; of an animation the first frame.

    Raises:
      InvalidRequest: no image of a known format, damaged, or larger than `MAX_PIXELS`.
    """
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise InvalidRequest(
                f"its {image.width}x{image.height} pixels are too many; send at most {MAX_PIXELS} pixels"
            )
        if image.getexif().get(_ORIENTATION, 1) != 1:
            image = ImageOps.exif_transpose(image)
        return image.convert("RGB")
    except _DECODE_ERRORS as exc:
        why = "unknown format" if isinstance(exc, UnidentifiedImageError) else exc
        raise InvalidRequest(f"its {len(data)} bytes can't be read as any of {', '.join(FORMATS)}: {why}") from exc


def png_url(image: Image.Image) -> str:
    """The image as a PNG in a data: URL."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


# --- checkpoints -----------------------------------------------------------------------------------------------


def has_vision(checkpoint: Path) -> bool:
    """Whether the model in a directory has a vision tower.

    Raises:
      ConfigError: its configuration can't be read.
    """
    return isinstance(_read_json(checkpoint / "config.json").get("vision_config"), dict)


def load_vision(checkpoint: Path, tokenizer: Any) -> QwenVision | NoVision:
    """What the checkpoint in a directory does with images.

    One whose way with them is not known here is served as one without: its text is served as ever.

    Raises:
      ConfigError: its files can't be read, or contradict each other.
    """
    if not has_vision(checkpoint):
        return NoVision()
    config = _read_json(checkpoint / "config.json")
    written = _processor_config(checkpoint)
    kind = str(written.get("image_processor_type") or "none")
    if kind.removesuffix("Fast").removesuffix("Pil") != _PROCESSOR:
        return NoVision(
            f"only images of checkpoints with the image processor {_PROCESSOR} are served, and that of this one is "
            f"{kind}; send text content only"
        )
    from transformers import Qwen2VLImageProcessorPil

    with boundary(ConfigError, f"the image processor of {checkpoint} can't be made", TypeError, ValueError, OSError):
        processor: Any = Qwen2VLImageProcessorPil.from_dict(dict(written))
    return QwenVision(
        pads=_find_pads(checkpoint, config, tokenizer),
        patch_len=int(processor.patch_size),
        merge_len=int(processor.merge_size),
        min_pixels=int(processor.size["shortest_edge"]),
        max_pixels=int(processor.size["longest_edge"]),
        processor=processor,
    )


def _processor_config(checkpoint: Path) -> JsonObject:
    """The image processor's settings: a file of their own, or a part of the processor's."""
    own = _read_json(checkpoint / "preprocessor_config.json")
    nested = _read_json(checkpoint / "processor_config.json").get("image_processor")
    return own or (nested if isinstance(nested, dict) else {})


def _find_pads(checkpoint: Path, config: JsonObject, tokenizer: Any) -> Pads:
    texts = {}
    for key in ("image_token_id", "video_token_id"):
        token_id: JsonValue = config.get(key)
        text = tokenizer.convert_ids_to_tokens(token_id) if isinstance(token_id, int) else None
        if isinstance(token_id, int) and isinstance(text, str):
            texts[token_id] = text
    image_id = config.get("image_token_id")
    if not isinstance(image_id, int) or image_id not in texts:
        raise ConfigError(f"{checkpoint}: config.json has a vision_config, but no image_token_id of the tokenizer's")
    return Pads(image_id=image_id, texts=texts)


def _read_json(path: Path) -> JsonObject:
    """The object in a file, {} where there is none."""
    if not path.is_file():
        return {}
    with boundary(ConfigError, f"{path} can't be read", OSError, ValueError):
        value = parse_json(path.read_bytes())
    return value if isinstance(value, dict) else {}
