"""Items that carry a file or a picture, which the server prepares."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from vitwire import wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.items import Areas, DType, Modality
from vitwire_server.core.models import Limits, ModelCard, Place, Preparation
from vitwire_server.observe.metrics.rpc import RpcMetrics
from vitwire_server.preparing.files.pool import DecodePool
from vitwire_server.scheduling.admission import Admission

RGB, RGBA = 3, 4
AXES_OF_IMAGE, AXES_OF_CLIP = 3, 4
_CLIP_BYTES = 8
"""Bytes of a clip's frames, for each pixel that a frame may have."""
MAX_PICTURE_BYTES = 96 << 20
"""Largest picture on its way to the device: 32 megapixels."""
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
    areas: Areas | None = None
    """Bounds of an image's area in place of the checkpoint's."""
    frames: tuple[int, ...] = ()
    """Frames of a clip's file in place of those that the model's rule chooses."""
    data: wire.Buffer = b""
    """The file or picture; empty while its bytes are still to come."""

    @property
    def field(self) -> str:
        """The field of the item that it came in."""
        return "pixels" if self.picture else "encoded"


class Prepared(NamedTuple):
    """The server's choices for a file or picture, for its report."""

    grid: tuple[int, int, int]
    frame_seconds: tuple[float, ...] = ()
    second_per_grid: float = 0.0


@dataclass(frozen=True, slots=True)
class Decoding:
    """Prepares files and pictures for all RPCs of a process."""

    pool: DecodePool
    waiting: Admission
    """Bounds the files in the process."""
    preparation: Preparation
    metrics: RpcMetrics


def is_picture(item: pb.Item) -> bool:
    """Whether the item's pixels are a picture that the server prepares: they come without a grid."""
    return item.HasField("pixels") and not item.HasField("grid")


def areas_of(item: pb.Item, card: ModelCard) -> Areas | None:
    """The bounds by the options of an item, which were checked; None without any."""
    if not item.options.HasField("min_pixels") and not item.options.HasField("max_pixels"):
        return None
    own, given = card.preprocessing[Modality.IMAGE], item.options
    least = given.min_pixels if given.HasField("min_pixels") else own.min_pixels
    return least, given.max_pixels if given.HasField("max_pixels") else own.max_pixels


def goes_to_device(picture: tuple[int, ...], card: ModelCard) -> bool:
    """Whether the engine, rather than a decoder, prepares a picture of this shape."""
    on_device = card.preparation.place is Place.DEVICE and len(picture) in (AXES_OF_IMAGE, AXES_OF_CLIP)
    if not on_device or picture[-1] != RGB or prod(picture) > MAX_PICTURE_BYTES:
        return False
    return not is_elongated(picture)


def is_elongated(picture: tuple[int, ...]) -> bool:
    """Whether a picture `(..., H, W, 3)` is too long and narrow for a device."""
    sides = picture[-3:-1]
    return max(sides) > _MOST_ELONGATED * min(sides)


def picture_bytes(limits: Limits) -> int:
    """Bytes of the largest picture, or frames of a clip, that is prepared."""
    return limits.encoded_pixels * _CLIP_BYTES
