"""Items that carry a file or a picture, which the server prepares."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from vitwire import wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.errors import Violation
from vitwire_server.core.items import DType, Modality
from vitwire_server.core.models import Limits, ModelCard, Place

_RGB, _RGBA = 3, 4
_AXES_OF_IMAGE, _AXES_OF_CLIP = 3, 4
_CLIP_BYTES = 8
"""Of the frames of a clip, for each pixel that a frame may have."""
MAX_PICTURE_BYTES = 96 << 20
"""Of a picture on its way to the device: 32 megapixels."""
_MOST_ELONGATED = 32
"""Longer side of a picture that goes to the device, in shorter sides: sums over millions of neighbours, which resizing
a longer one takes, would hold up everyone's batches."""


@dataclass(frozen=True, slots=True)
class Unprepared:
    """An item with a file or a picture, checked as far as that is possible before it is read."""

    message: pb.Item
    """Without the bytes of the file or picture."""
    modality: Modality
    output: DType
    nbytes: int
    picture: tuple[int, ...] | None = None
    """The shape of a picture, or of the frames of a clip; None for a file."""
    data: wire.Buffer = b""
    """The file or picture; empty while its bytes are still to come."""

    @property
    def field(self) -> str:
        """The field of the item that it came in."""
        return "pixels" if self.picture else "encoded"


def is_picture(item: pb.Item) -> bool:
    """Whether the item's pixels are a picture that the server prepares: they come without a grid."""
    return item.HasField("pixels") and not item.HasField("grid")


def goes_to_device(picture: tuple[int, ...], card: ModelCard) -> bool:
    """Whether the engine, rather than a decoder, prepares a picture of this shape."""
    on_device = card.preparation.place is Place.DEVICE and len(picture) in (_AXES_OF_IMAGE, _AXES_OF_CLIP)
    if not on_device or picture[-1] != _RGB or prod(picture) > MAX_PICTURE_BYTES:
        return False
    return not is_elongated(picture)


def is_elongated(picture: tuple[int, ...]) -> bool:
    """Whether a picture `(..., H, W, 3)` is too long and narrow for a device."""
    sides = picture[-3:-1]
    return max(sides) > _MOST_ELONGATED * min(sides)


def picture_bytes(limits: Limits) -> int:
    """Bytes of the largest picture, or frames of a clip, that is prepared."""
    return limits.encoded_pixels * _CLIP_BYTES


def wrong_file(item: pb.Item, nbytes: int, limits: Limits) -> Iterator[Violation]:
    """What is wrong about an item with a file of so many bytes; fields are named within the item."""
    most = limits.encoded_bytes
    if not most:
        yield Violation("encoded", "is not accepted: this server prepares no files; send pixels")
    elif nbytes > most:
        yield Violation("encoded", f"has {nbytes} bytes, at most {most} are accepted")
    if item.HasField("pixels"):
        yield Violation("encoded", "must be empty if the item has pixels")
    if item.HasField("crops"):
        yield Violation("crops", "must be absent: the server makes the crops of a file")
    if item.HasField("grid"):
        yield Violation("grid", "must be absent: the server chooses the grid of a file")


def wrong_picture(item: pb.Item, modality: Modality, card: ModelCard) -> Iterator[Violation]:
    """What is wrong about an item with a picture; fields are named within the item."""
    shape, limits = tuple(item.pixels.shape), card.limits
    axes = _AXES_OF_CLIP if modality is Modality.VIDEO else _AXES_OF_IMAGE
    if item.HasField("crops"):
        yield Violation("crops", "must be absent: the server makes the crops of a picture")
    if modality not in card.prepared:
        yield Violation("grid", "is missing, and this server prepares no pictures of this modality")
    elif len(shape) != axes or shape[-1] not in (_RGB, _RGBA) or item.pixels.data_type != pb.DATA_TYPE_UINT8:
        layout = "(frames, height, width, 3 or 4)" if modality is Modality.VIDEO else "(height, width, 3 or 4)"
        given = f"{list(shape[:4])}" + ("..." if len(shape) > 4 else "")
        yield Violation("grid", f"is missing: only a picture has none, {layout} in UINT8; pixels are {given}")
    elif min(shape) < 1:
        yield Violation("pixels.shape", f"must be of at least one pixel, got {list(shape)}")
    elif shape[-3] * shape[-2] > limits.encoded_pixels:
        size = f"{shape[-2]}x{shape[-3]}"
        yield Violation("pixels.shape", f"is a picture of {size}, the limit is {limits.encoded_pixels} pixels")
    elif prod(shape) > picture_bytes(limits):
        yield Violation("pixels.shape", f"takes {prod(shape)} bytes, at most {picture_bytes(limits)} are accepted")
