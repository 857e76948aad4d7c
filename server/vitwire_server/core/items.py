"""Items, the unit of packing, and the tensors they carry."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from math import prod

from vitwire_server.core.delivery import DeviceRows, Region
from vitwire_server.core.grids import Footprint, Grid, retained


class Modality(StrEnum):
    """Kind of an item."""

    IMAGE = "image"
    VIDEO = "video"


class DType(Enum):
    """Element type of a tensor on the wire: its name and its size in bytes."""

    FLOAT32 = ("float32", 4)
    FLOAT16 = ("float16", 2)
    BFLOAT16 = ("bfloat16", 2)
    UINT8 = ("uint8", 1)

    def __init__(self, label: str, size: int) -> None:
        self.label = label
        self.size = size

    @classmethod
    def of(cls, label: str) -> "DType":
        """The type named `label`. Raises KeyError for another name."""
        return cls[label.upper()]


Areas = tuple[int, int]
"""Bounds of the area of a resized image, in pixels."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """A tensor as a view of a buffer owned elsewhere; little-endian, C order."""

    data: memoryview | bytes | bytearray
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that type and shape require."""
        return prod(self.shape) * self.dtype.size


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One image or clip with its footprint on the tower that will encode it; its tensors may still lack their bytes."""

    modality: Modality
    grid: Grid
    pixels: Pixels
    footprint: Footprint
    output: DType
    """Type of the rows to return."""
    keep_ratio: float = 0.0
    """Share of a clip's tokens to return, in (0, 1); 0 returns all."""
    crops: Pixels | None = None
    """Crops of models that take an overview and crops; None without any."""
    content_id: str = ""
    """The client's name of the content; empty without one."""
    region: Region | None = None
    """Where the rows are to be written; None if they are returned."""
    on_device: bool = False
    """Whether the region is in memory of a device."""
    store_only: bool = False
    """Whether the rows are only cached, on the device if there is room."""
    is_picture: bool = False
    """Whether the pixels are a picture, `(H, W, 3)` or `(F, H, W, 3)`, that the engine prepares."""
    areas: Areas | None = None
    """Bounds for such a picture, in place of the checkpoint's."""
    in_groups: bool = False
    """Whether rows of a clip may be returned while others are computed, or the item is a part of such a clip."""

    def filled(self, data: memoryview) -> "Item":
        """The item with its `nbytes` bytes at the beginning of `data`: pixels, then crops."""
        pixels, crops = self.pixels, self.crops
        end = pixels.nbytes
        filled = Pixels(data[:end], pixels.dtype, pixels.shape)
        return replace(
            self,
            pixels=filled,
            crops=Pixels(data[end : end + crops.nbytes], crops.dtype, crops.shape) if crops else None,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return self.pixels.nbytes + (self.crops.nbytes if self.crops else 0)

    def weight(self, width: int) -> int:
        """Bytes that the item holds on the host until its answer was sent: pixels, then rows of `width` columns."""
        return self.nbytes + self.rows_nbytes(width)

    def rows_nbytes(self, width: int) -> int:
        """Bytes of the rows, of `width` columns."""
        return self.rows * width * self.output.size

    @property
    def rows(self) -> int:
        """Rows to return: known before anything runs."""
        return retained(self.footprint.rows, self.grid.t, self.keep_ratio)


@dataclass(frozen=True, slots=True)
class CacheLookup:
    """An item without pixels: a request for the embedding that is cached under a name."""

    content_id: str
    modality: Modality | None
    """None accepts any."""
    grid: Grid | None
    output: DType
    keep_ratio: float
    region: Region | None = None
    store_only: bool = False
    """Whether to answer only that the embedding is cached."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """Output rows of one item: `(rows, width)`, little-endian, C order. They are on the host, the device, or both."""

    data: memoryview
    """Empty for rows that are only on the device."""
    dtype: DType
    shape: tuple[int, int]
    kept: tuple[int, ...] = ()
    """Indices of the tokens whose rows these are; empty for all of them."""
    device: DeviceRows | None = None
    """The rows in device memory that they can be delivered from."""

    @property
    def is_on_host(self) -> bool:
        """Whether `data` are the rows."""
        return self.device is None or bool(self.data)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return prod(self.shape) * self.dtype.size


def total(footprints: Sequence[Footprint]) -> Footprint:
    """The footprint of items that share one forward."""
    return Footprint(
        patches=sum(f.patches for f in footprints),
        tokens=sum(f.tokens for f in footprints),
        segments=sum(f.segments for f in footprints),
        longest=max((f.longest for f in footprints), default=0),
        crops=sum(f.crops for f in footprints),
        pooled=sum(f.pooled for f in footprints),
    )
