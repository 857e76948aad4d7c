"""vLLM's media connector, but it keeps image files undecoded and reads only their headers."""

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import torch
from PIL import ExifTags, Image
from prometheus_client import Counter, Histogram
from vllm import envs
from vllm.multimodal.image import open_image
from vllm.multimodal.media import MediaConnector, MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO

if TYPE_CHECKING:
    from concurrent.futures import Future

IMAGES = Counter(
    "vitwire_front_end_images",
    "Images of requests: accepted by Vitwire, or the reason why vLLM handles them.",
    ["outcome"],
)
ACCEPTING = Histogram(
    "vitwire_front_end_accept_seconds",
    "From an image's upload until Vitwire accepted it.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
FORMATS = frozenset({"JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP"})
"""Pillow's names of what servers decode; MPO is a camera's JPEG with further pictures."""
_WHITE = (255, 255, 255)
_TURNED = frozenset({5, 6, 7, 8})
"""EXIF orientations that swap width and height."""


@dataclass(frozen=True, slots=True)
class Reference:
    """An image that the server accepted."""

    content_id: str
    fields: Mapping[str, torch.Tensor]
    """What the model's processor makes of an image, but for its pixels."""


class ImageFile(MediaWithBytes[Image.Image]):  # type: ignore[misc]  # vLLM has no type information
    """The file of an image; decoded, as vLLM would have, when its `media` is used."""

    def __init__(self, content: bytes, size: tuple[int, int], reader: ImageMediaIO) -> None:
        self.original_bytes = content
        self.size = size
        """`(width, height)` as it is shown."""
        self.upload: Future[Reference | None] | None = None
        self.reference: Reference | None = None
        self._reader = reader
        self._decoded: MediaWithBytes[Image.Image] | None = None

    @property
    def header(self) -> Image.Image:
        """An image of this size without pixels."""
        image = Image.Image()
        image._size, image._mode = self.size, "RGB"  # noqa: SLF001  # Pillow has no other way
        return image

    def decoded(self) -> MediaWithBytes[Image.Image]:
        """As vLLM reads it. Raises ValueError for a broken file."""
        if self._decoded is None:
            self._decoded = self._reader.load_bytes(self.original_bytes)
        return self._decoded

    media = property(lambda self: self.decoded().media)
    io_config = property(lambda self: self.decoded().io_config)


class ImageFileIO(ImageMediaIO):  # type: ignore[misc]  # as above
    """Reads only the header, within vLLM's limits; other formats and options are left to vLLM."""

    def load_bytes(self, data: bytes) -> MediaWithBytes[Image.Image]:
        is_default = self.image_mode == "RGB" and self.rgba_background_color == _WHITE and not self.kwargs
        try:
            image = open_image(BytesIO(data)) if is_default else None
            size = _shown(image) if image and image.format in FORMATS else None
        except Exception:  # noqa: BLE001  # libraries raise anything over broken files; vLLM says what is wrong
            size = None
        pixels = size[0] * size[1] if size else 0
        if size is None or 0 < envs.VLLM_MAX_IMAGE_PIXELS < pixels:
            IMAGES.labels("format" if is_default else "options").inc()
            return super().load_bytes(data)
        if self.decoded_budget is not None:
            self.decoded_budget.charge(pixels * 4)
        return ImageFile(data, size, ImageMediaIO(self.image_mode))


def _shown(image: Image.Image) -> tuple[int, int]:
    """Width and height after EXIF rotation. EXIF after a PNG's pixels is not seen."""
    width, height = image.size
    found = Image.Image.getexif(image).get(ExifTags.Base.Orientation)  # a PNG's own would decode it
    return (height, width) if found in _TURNED else (width, height)


class FileConnector(MediaConnector):  # type: ignore[misc]  # as above
    """vLLM's, which keeps its limits on URLs, bytes and pixels."""

    def _image_io(self, image_mode: str | None = "RGB") -> ImageMediaIO:
        options = {"image_mode": image_mode} | self.media_io_kwargs.get("image", {})
        return ImageFileIO(**options, decoded_budget=self.decoded_budget)
