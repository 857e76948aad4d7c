"""The server's description of its model and limits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

from vitwire.v1 import encoder_pb2 as pb

R = TypeVar("R", "Budget", "Limits", "Model", "Place")


@dataclass(frozen=True, slots=True)
class Budget:
    """Capacity of one captured graph."""

    tokens: int
    items: int
    segments: int
    """Attention segments: frames of images and clips."""
    segment_patches: int
    """Longest segment, in patches."""
    crops: int = 0
    """Crops, in models that take them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request and of the server's queue; 0 if the server does not say."""

    request_bytes: int
    items_per_request: int
    patches_per_item: int
    queued_items: int
    queued_bytes: int
    encoded_bytes: int = 0
    """Maximum bytes of a file; 0 if the server does not decode."""
    encoded_pixels: int = 0
    """Maximum pixels of an image in a file, or of a frame of a clip."""
    cached_bytes: int = 0
    """Size of the server's embedding cache; 0 if it has none."""


@dataclass(frozen=True, slots=True)
class TileShapes:
    """Format of a processor's output for a model that takes tiles."""

    tile: tuple[int, int]
    """Height and width of a tile: pixels are `(tiles, 3, H, W)`."""
    crop: tuple[int, int] | None
    """Height and width of a crop; None if the model takes none."""
    patch: int
    """Side of a patch, if grids are `(1, rows, columns)` of the patches that show the image; 0: grids count tiles."""
    single: bool
    """Whether every image is one tile."""
    layouts: tuple[tuple[int, int], ...]
    """Rows and columns, of which the processor chooses those that keep most pixels; empty if it chooses otherwise."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step runs: device or cpu; empty if the server does not say."""

    place: str
    reason: str
    """Why not on the device; empty otherwise."""

    def __str__(self) -> str:
        return f"{self.place} ({self.reason})" if self.reason else self.place


@dataclass(frozen=True, slots=True)
class Model:
    """The server's model, the pixels that it takes, and the server's limits."""

    model_id: str
    model_type: str
    """`model_type` of the checkpoint's config.json."""
    weights_fingerprint: str
    """SHA-256 over the names and bytes of the tower's weights and the pooling, in hex."""
    dtype: str
    """Type that the tower computes in and, by default, returns: float32, float16 or bfloat16."""
    embedding_width: int
    """Columns of an embedding, including deepstack levels."""
    deepstack_levels: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    channels: int
    budgets: tuple[Budget, ...]
    """Captured budgets in ascending order; empty when graphs are off."""
    limits: Limits
    graphs: str
    """cuda, simulated or off."""
    attention_backend: str
    device: str
    server_version: str
    device_sharing: str = ""
    """A CUDA device's name, memory that was free at start, bound of the server's memory, and MPS, in a line."""
    deliveries: tuple[str, ...] = ()
    """Supported deliveries of embeddings: stream, nixl."""
    encodings: tuple[str, ...] = ()
    """Files that the server decodes: jpeg, png, webp, gif, bmp, avif, tiff, ico, jpeg2000, mp4, webm, avi, mpeg_ts."""
    pooling: str = "none"
    """none: one vector per token; cls, mean or attention: one vector per image, or per frame of a clip."""
    available_poolings: tuple[str, ...] = ("none",)
    """Poolings that the server offers for this model (`--pooling`)."""
    prepared: tuple[str, ...] = ()
    """Modalities whose pictures and files the server prepares: image, video."""
    preparation_fingerprint: str = ""
    """SHA-256 over all that affects this preparation, in hex."""
    options: tuple[str, ...] = ()
    """Fields of `ProcessorOptions` that items may have."""
    preparation: Place = Place("", "")
    """Where pictures are prepared."""
    decoding: Place = Place("", "")
    """Where JPEG files are decoded and prepared."""
    clip_decoding: Place = Place("", "")
    """Where clips are decoded and prepared."""
    unavailable: tuple[str, ...] = ()
    """Features of this kind of device that the server cannot use here, each with the reason."""
    dropped_budgets: tuple[str, ...] = ()
    """Budgets that could not be captured, each with the reason."""
    tiles: TileShapes | None = None
    """None if the model takes patches."""
    rows_by_grid: tuple[str, ...] = ()
    """Modalities whose items of grid (t, h, w) have t*h*w / merge_size**2 vectors."""
    matryoshka: tuple[int, ...] | None = None
    """Lengths that pooled vectors may be cut to, any if empty; None if they may not be cut."""
    clip_groups: bool = False
    """Whether rows of clips can leave while others are computed: `iter_encode(groups=True)`."""

    def group_seconds(self, frame_seconds: Sequence[float]) -> list[float]:
        """The middle of each group of a clip's frames in seconds, as the models' processors compute it for prompts.

        frame_seconds: of `Accepted`, or of the embedding's report.
        """
        size = self.temporal_patch_size
        groups = [frame_seconds[start : start + size] for start in range(0, len(frame_seconds), size)]
        return [(group[0] + group[-1]) / 2 for group in groups]

    def tokens(self, grid: tuple[int, int, int], rows: int) -> int:
        """Tokens of an item in the tower, before pooling. rows: of its embedding."""
        if self.pooling == "none":
            return rows
        if self.tiles and not self.tiles.patch:
            return grid[0] * math.prod(self.tiles.tile) // (self.patch_size * self.merge_size) ** 2
        return math.prod(grid) // self.merge_size**2

    @classmethod
    def from_message(cls, message: pb.GetModelResponse) -> "Model":
        """Raises ValueError for inconsistent settings."""
        poolings = tuple(_name(pb.Pooling.DESCRIPTOR, each) for each in message.available_poolings)
        model = _same(
            cls,
            message,
            dtype=_name(pb.DataType.DESCRIPTOR, message.data_type),
            budgets=tuple(_same(Budget, each) for each in message.budgets),
            limits=_same(Limits, message.limits),
            options=tuple(message.options),
            preparation=_same(Place, message.preparation),
            decoding=_same(Place, message.decoding),
            clip_decoding=_same(Place, message.clip_decoding),
            unavailable=tuple(f"{each.feature} ({each.reason})" for each in message.unavailable),
            dropped_budgets=tuple(f"{each.tokens} ({each.reason})" for each in message.dropped_budgets),
            available_poolings=poolings or ("none",),
            tiles=_tile_shapes(message.tiles) if message.HasField("tiles") else None,
            matryoshka=tuple(message.matryoshka.dimensions) if message.HasField("matryoshka") else None,
        )
        if model.embedding_width < 1 or model.embedding_width % (1 + model.deepstack_levels):
            raise ValueError(f"embedding_width {model.embedding_width} with {model.deepstack_levels} deepstack levels")
        if model.merge_size < 1:
            raise ValueError("merge_size 0")
        return model


def _same(kind: type[R], message: Message, **others: object) -> R:
    """A record of the message's fields by the same names, and of others."""
    values: dict[str, Any] = others
    known: Any = message.DESCRIPTOR.fields_by_name  # whose stubs have two classes
    for name in {each.name for each in fields(kind)} - others.keys():
        value, enum = getattr(message, name), known[name].enum_type
        if enum is not None:
            value = _name(enum, value) if isinstance(value, int) else tuple(_name(enum, each) for each in value)
        values[name] = value
    return kind(**values)


def _tile_shapes(message: pb.Tiles) -> TileShapes:
    return TileShapes(
        tile=(message.tile.height, message.tile.width),
        crop=(message.crop.height, message.crop.width) if message.HasField("crop") else None,
        patch=message.patch,
        single=message.single,
        layouts=tuple((layout.rows, layout.columns) for layout in message.layouts),
    )


def _name(enum: EnumDescriptor, number: int) -> str:
    """The name of an enum's value in lower case, without the prefix of the enum."""
    if number not in enum.values_by_number:
        return f"number {number}"
    if not number:
        return {"Pooling": "none", "DataType": "unspecified"}.get(enum.name, "")
    prefix = "".join(f"_{letter}" if letter.isupper() else letter for letter in enum.name).strip("_")
    name: str = enum.values_by_number[number].name
    return name.removeprefix(f"{prefix.upper()}_").lower()
