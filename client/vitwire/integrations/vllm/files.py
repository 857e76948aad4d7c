"""vLLM's media connector, but it keeps files of images and clips undecoded and reads only their headers."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import ExifTags, Image
from prometheus_client import Counter, Histogram
from vllm import envs
from vllm.multimodal.image import open_image
from vllm.multimodal.media import MediaConnector, MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO
from vllm.multimodal.video import VideoBackend, cv2

from vitwire.items import Modality
from vitwire.shared.file_kinds import kind_of

if TYPE_CHECKING:
    from concurrent.futures import Future

Json = dict[str, Any]
IMAGES = Counter(
    "vitwire_front_end_images",
    "Images of requests: accepted by Vitwire, or the reason why vLLM handles them.",
    ["outcome"],
)
CLIPS = Counter(
    "vitwire_front_end_clips",
    "Clips of requests: accepted by Vitwire, or the reason why vLLM handles them.",
    ["outcome"],
)
ACCEPTING = Histogram(
    "vitwire_front_end_accept_seconds",
    "From the upload of an image or clip until Vitwire accepted it.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)
FORMATS = frozenset({"JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP"})
"""Pillow's names of what servers decode; MPO is a camera's JPEG with further pictures."""
_DECODING = frozenset({"backend", "frame_recovery"})
"""Options that make vLLM decode other frames, or from another library."""
_CONTAINERS = ("mp4", "webm")
"""Of clips, in which a frame has the same number in OpenCV and in the encoder: others may begin with broken ones."""
_WHITE = (255, 255, 255)
_TURNED = frozenset({5, 6, 7, 8})
"""EXIF orientations that swap width and height."""


@dataclass(frozen=True, slots=True)
class Reference:
    """An image or clip that the server accepted."""

    content_id: str
    fields: Mapping[str, object]
    """What the model's processor makes of it, but for its pixels."""


class MediaFile(MediaWithBytes[Any]):  # type: ignore[misc]  # vLLM has no type information
    """The file of an image or clip."""

    modality: Modality = "image"

    def __init__(self, content: bytes, reader: ImageMediaIO | VideoMediaIO) -> None:
        self.original_bytes = content
        self.upload: Future[Reference | None] | None = None
        self.reference: Reference | None = None
        self.tokens = 0
        """Places of its embedding, if they are known before it is decoded."""
        self.decoding = 0.0
        """Seconds that it took here, if it became the engine's to encode."""
        self._reader = reader
        self._decoded: MediaWithBytes[Any] | None = None

    def decoded(self) -> MediaWithBytes[Any]:
        """As vLLM reads it. Raises ValueError for a broken file."""
        if self._decoded is None:
            self._decoded = self._reader.load_bytes(self.original_bytes)
        return self._decoded


class ImageFile(MediaFile):
    """The file of an image; decoded when its `media` is used."""

    def __init__(self, content: bytes, size: tuple[int, int], reader: ImageMediaIO) -> None:
        super().__init__(content, reader)
        self.size = size
        """`(width, height)` as it is shown."""

    @property
    def header(self) -> Image.Image:
        """An image of this size without pixels."""
        image = Image.Image()
        image._size, image._mode = self.size, "RGB"  # noqa: SLF001  # Pillow has no other way
        return image

    media = property(lambda self: self.decoded().media)
    io_config = property(lambda self: self.decoded().io_config)


class ClipFile(MediaFile):
    """The file of a clip; unless the server accepted it, it is decoded when its `media` is used."""

    modality = "video"

    def __init__(self, content: bytes, frames: np.ndarray[Any, Any], metadata: Json, reader: VideoMediaIO) -> None:
        super().__init__(content, reader)
        self.frames = frames
        """The chosen frames `(F, H, W, 3)`, black: only their shape is known."""
        self.metadata = metadata
        """vLLM's: `frames_indices`, `fps`, `total_num_frames`, …"""

    @property
    def header(self) -> tuple["ClipFile", Json]:
        """What vLLM's parser makes of clips."""
        return self, self.metadata

    media = property(lambda self: self.frames if self.reference else self.decoded().media)
    io_config = None


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


class ClipFileIO(VideoMediaIO):  # type: ignore[misc]  # as above
    """Lets vLLM choose the frames of a clip, and reads none; vLLM keeps other decoders and containers."""

    def __init__(self, reader: VideoMediaIO) -> None:
        self.__dict__.update(reader.__dict__)
        self._reader = reader

    def load_bytes(self, data: bytes) -> MediaWithBytes[Any]:
        loader = type(self._reader.video_loader)
        if not issubclass(loader, VideoBackend) or self.kwargs.keys() & _DECODING:
            CLIPS.labels("options").inc()
            return self._reader.load_bytes(data)
        if kind_of(data) not in _CONTAINERS:
            CLIPS.labels("format").inc()
            return self._reader.load_bytes(data)
        self.video_loader = _choosing(loader)()  # type: ignore[arg-type]  # Any, without type information
        frames, metadata = super().load_bytes(data).media
        unbounded = copy(self._reader)
        unbounded.image_io = ImageMediaIO(self.image_io.image_mode)  # what it decodes was charged now
        return ClipFile(data, frames, metadata, unbounded)


@cache
def _choosing(loader: type[VideoBackend]) -> type[VideoBackend]:
    """The loader of a model, but without pixels: it has the shape of the frames only."""

    def read_frames(
        capture: "cv2.VideoCapture", frame_idx: Sequence[int], total_frames_num: int, **_: object
    ) -> tuple[np.ndarray[Any, Any], list[int]]:
        del total_frames_num
        height, width = (int(capture.get(each)) for each in (cv2.CAP_PROP_FRAME_HEIGHT, cv2.CAP_PROP_FRAME_WIDTH))
        return np.broadcast_to(np.uint8(0), (len(frame_idx), height, width, 3)), list(frame_idx)

    return type(loader.__name__, (loader,), {"read_frames": staticmethod(read_frames)})


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

    def load_from_url(self, url: str, media_io: object, **named: object) -> object:
        return super().load_from_url(url, _reading_headers(media_io), **named)

    async def load_from_url_async(self, url: str, media_io: object, **named: object) -> object:
        return await super().load_from_url_async(url, _reading_headers(media_io), **named)


def _reading_headers(media_io: object) -> object:
    return ClipFileIO(media_io) if type(media_io) is VideoMediaIO else media_io
