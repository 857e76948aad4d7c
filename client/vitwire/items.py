"""Items: one image or clip each, as patches, tiles, a picture or a file."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from vitwire._inputs.processors import processor_cuts
from vitwire._inputs.sources import FileLike, file_bytes, pixels_of
from vitwire._inputs.splitting import Cut
from vitwire._inputs.tensors import DATA_TYPES, Pixels, TorchTensor, invalid, type_name
from vitwire.errors import InvalidItem, Violation
from vitwire.options import ProcessorOptions
from vitwire.shared.file_kinds import CLIPS, kind_of
from vitwire.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from vitwire.model import Model

Modality = Literal["image", "video"]
Priority = Literal["interactive", "batch"]


MODALITIES: dict[str, "pb.Modality.ValueType"] = {"image": pb.MODALITY_IMAGE, "video": pb.MODALITY_VIDEO}
_TYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}
_GRID_SIDES = ("t", "h", "w")
_MAX_GRID_SIDE = 2**32 - 1
_UNKNOWN_GRID = (0, 0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One image or clip to encode.

    pixels: with a grid, `(t*h*w, C*T*p*p)` patches as the model's Hugging Face processor emits them, or
        `(tiles, 3, H, W)` for tile towers; a numpy array or a torch tensor of uint8, float32, float16 or bfloat16,
        read when the item is sent. uint8 means before rescaling and normalisation; for images the frame axis T may be
        omitted. Without a grid, a picture that the server prepares: uint8 `(H, W, 3)` in RGB or `(H, W, 4)` with
        alpha, for a clip `(F, H, W, 3 or 4)`. None requests the embedding cached under `content_id`.
    grid: `(t, h, w)` in patches; `(tiles, rows, cols)` for tile towers, `(tiles, 1, 1)` if only
        the number of tiles is known. Leave it out for a picture or file: the server chooses the grid.
    modality: "image" or "video".
    content_id: key of the content in the server's embedding cache.
    keep_ratio: share of a video's tokens to keep, in (0, 1); 0 and 1 disable pruning.
    crops: for towers that take crops; the same types as `pixels`.
    encoded: a file, which the server decodes and prepares; without `pixels`, `crops` and `grid`.
        `Model.encodings` lists the formats.
    options: of the processor, for an image that the server prepares, or a clip's file: `ProcessorOptions`, or a mapping
        of its fields and `size`, which becomes one.

    Raises InvalidItem, naming the field, for errors that can be found without the model.
    """

    pixels: Pixels | None = None
    grid: tuple[int, int, int] = _UNKNOWN_GRID
    modality: Modality = "image"
    content_id: str | None = None
    keep_ratio: float = 0.0
    crops: Pixels | None = None
    encoded: bytes | bytearray | memoryview | None = None
    options: ProcessorOptions | Mapping[str, object] | None = None

    @classmethod
    def from_file(
        cls,
        path: FileLike,
        *,
        modality: Modality | None = None,
        content_id: str | None = None,
        keep_ratio: float = 0.0,
        options: ProcessorOptions | Mapping[str, object] | None = None,
    ) -> Self:
        """An item with the bytes of a file, which the server decodes.

        path: a path, a `data:` URI, the bytes of a file, or a file object.
        modality: by default "video" for MP4, WebM, AVI and MPEG-TS files, else "image".
        Raises OSError for a file that cannot be read, ValueError for a URL, and TypeError for text.
        """
        encoded = file_bytes(path)
        if modality is None:
            modality = "video" if kind_of(encoded) in CLIPS else "image"
        return cls(modality=modality, content_id=content_id, keep_ratio=keep_ratio, encoded=encoded, options=options)

    @classmethod
    def from_image(
        cls,
        image: object,
        *,
        content_id: str | None = None,
        options: ProcessorOptions | Mapping[str, object] | None = None,
    ) -> Self:
        """An item with a picture, which the server prepares.

        image: a Pillow image, or a uint8 array `(H, W)`, `(H, W, C)` or `(C, H, W)` with 1, 3 or 4 channels.
        Raises ValueError or TypeError for anything else.
        """
        return cls(pixels_of(image), content_id=content_id, options=options)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", ProcessorOptions.of(self.options))
        violations = list(self._violations())
        violations += self._option_violations(ProcessorOptions.of(self.options))
        if violations:
            text = "; ".join(f"{each.field}: {each.description}" for each in violations)
            raise InvalidItem(text, violations=violations)
        t, h, w = (int(side) for side in self.grid)
        object.__setattr__(self, "grid", (t, h, w))

    @classmethod
    def from_processor(
        cls,
        outputs: Mapping[str, object],
        model: "Model | None" = None,
        *,
        grid_thw: object = None,
        content_ids: Sequence[str | None] | None = None,
        keep_ratio: float = 0.0,
    ) -> "list[Item]":
        """The items of a Hugging Face processor's outputs: images, then videos, in order.

        outputs: the BatchFeature or dict, with tensors of numpy or torch, on any device; `pixel_values` and
            `pixel_values_videos` are used, with the keys that belong to them.
        model: `client.model()`; needed if the outputs alone are ambiguous (Pixtral, Mistral 3, DeepSeek-VL).
        grid_thw: grids of the images, or their numbers of tiles, if the outputs have none (InternVL, Llama 4).
        content_ids: one per item; None for an item without one.
        keep_ratio: for videos; see `Item`.

        Raises InvalidItem, naming the field, if outputs are not consistent.
        """
        images, clips = processor_cuts(outputs, model, grid_thw)
        ids = ids_of(content_ids, len(images) + len(clips))
        return [
            *items_of(images, "image", ids[: len(images)], 0.0 if clips else keep_ratio),
            *items_of(clips, "video", ids[len(images) :], keep_ratio),
        ]

    def __repr__(self) -> str:
        """With the types and shapes of its tensors rather than their values."""
        shown = {
            "pixels": self.pixels if self.pixels is None else _outline(self.pixels),
            "crops": self.crops if self.crops is None else _outline(self.crops),
            "encoded": self.encoded if self.encoded is None else f"{len(self.encoded)} bytes",
            "grid": self.grid if any(self.grid) else None,
            "modality": self.modality,
            "content_id": None if self.content_id is None else repr(self.content_id),
            "keep_ratio": self.keep_ratio or None,
            "options": self.options,
        }
        return f"Item({', '.join(f'{name}={value}' for name, value in shown.items() if value is not None)})"

    @property
    def _has_grid(self) -> bool:
        return not (isinstance(self.grid, tuple) and self.grid == _UNKNOWN_GRID)

    def _option_violations(self, options: ProcessorOptions | None) -> Iterator[Violation]:
        has_picture = self.pixels is not None and not self._has_grid
        is_image = self.modality == "image" and (self.encoded is not None or has_picture)
        if options and options.areas() and not is_image:
            text = "is only for images that the server prepares: files, and pictures without a grid"
            yield Violation(f"options.{min(options.areas())}", text)
        if options and options.frames and (self.modality != "video" or self.encoded is None):
            yield Violation("options.frames", "is only for files of clips")

    def _violations(self) -> Iterator[Violation]:
        if self.encoded is not None:
            yield from self._encoded_violations()
        elif self._has_grid:
            yield from _grid_violations(self.grid)
        elif self.pixels is not None:
            yield from self._picture_violations(self.pixels)
        if not isinstance(self.modality, str) or self.modality not in MODALITIES:
            yield Violation("modality", f"expected one of {', '.join(MODALITIES)}, got {self.modality!r}")
        if not isinstance(self.keep_ratio, int | float) or not 0.0 <= self.keep_ratio <= 1.0:
            yield Violation("keep_ratio", f"expected a share in [0, 1], got {self.keep_ratio!r}")
        if not (self.content_id is None or isinstance(self.content_id, str)):
            yield Violation("content_id", f"expected a string, got {type(self.content_id).__name__}")
        if self.pixels is None and self.encoded is None and not self.content_id:
            yield Violation("pixels", "an item without pixels needs encoded bytes or a content_id")
        for name, tensor in (("pixels", self.pixels), ("crops", self.crops)):
            if tensor is not None and (problem := _problem(tensor)):
                yield Violation(name, problem)

    def _picture_violations(self, pixels: object) -> Iterator[Violation]:
        if not isinstance(pixels, np.ndarray | TorchTensor):
            return  # which is named below
        axes, layout = (4, "(F, H, W, 3 or 4)") if self.modality == "video" else (3, "(H, W, 3 or 4)")
        shape = tuple(pixels.shape)
        if type_name(pixels) != "uint8" or len(shape) != axes or shape[-1] not in (3, 4) or not all(shape):
            got = f"{type_name(pixels)} of shape {shape}"
            yield Violation("grid", f"is missing: only pictures have none, uint8 of shape {layout}; got pixels {got}")
        if self.crops is not None:
            yield Violation("crops", "must be absent: the server makes the crops of a picture")

    def _encoded_violations(self) -> Iterator[Violation]:
        if not isinstance(self.encoded, bytes | bytearray | memoryview):
            yield Violation("encoded", f"expected bytes, got {type(self.encoded).__name__}")
        elif not len(self.encoded):
            yield Violation("encoded", "is empty")
        if self.pixels is not None or self.crops is not None:
            yield Violation("encoded", "an item has either encoded bytes or pixels and crops")
        if self._has_grid:
            yield Violation("grid", "the server chooses the grid of an encoded item: leave it out")


def checked(item: object, position: int) -> Item:
    """The item. Raises InvalidItem for anything else."""
    if isinstance(item, Item):
        return item
    advice = "use encode_images for files and pictures, encode_batch for what a processor returned"
    raise InvalidItem(f"expected an Item, got {type(item).__name__}: {advice}", item=position)


def numbered(items: Iterable[Item]) -> dict[int, Item]:
    """The items by position. Raises TypeError if they are no collection, and InvalidItem if it has anything else."""
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise TypeError(f"expected a list of Items, got a single {type(items).__name__}")
    return {position: checked(item, position) for position, item in enumerate(items)}


def pixel_bytes(item: Item) -> int:
    """Bytes of the pixels, before any are rounded, or of the file."""
    tensors = [tensor for tensor in (item.pixels, item.crops) if tensor is not None]
    of_tensors = sum(math.prod(tensor.shape) * _TYPE_BYTES[type_name(tensor)] for tensor in tensors)
    return of_tensors + (bytes_of(item.encoded).nbytes if item.encoded is not None else 0)


def without_pixels(item: Item) -> Item:
    """The item without its content, to look up its content_id in the cache; without a content_id, the item itself."""
    return replace(item, pixels=None, crops=None, encoded=None, options=None) if item.content_id else item


def ids_of(content_ids: Sequence[str | None] | None, count: int) -> Sequence[str | None]:
    """The content ids of `count` items. Raises InvalidItem unless there is one for each."""
    if content_ids is None:
        return [None] * count
    if isinstance(content_ids, str) or len(content_ids) != count:
        given = "one string" if isinstance(content_ids, str) else f"{len(content_ids)}"
        raise invalid("content_ids", f"expected one for each of the {count} items, got {given}")
    return content_ids


def items_of(cuts: Sequence[Cut], modality: Modality, ids: Sequence[str | None], keep_ratio: float) -> Iterator[Item]:
    """The parts of a processor's outputs as items. Raises InvalidItem, with the position."""
    for at, (own, content_id) in enumerate(zip(cuts, ids, strict=True)):
        try:
            yield Item(own.pixels, own.grid, modality, content_id, keep_ratio, own.crops)
        except InvalidItem as error:
            raise InvalidItem(str(error), item=at, violations=error.violations) from None


def _grid_violations(grid: object) -> Iterator[Violation]:
    try:
        sides = [int(side) for side in grid]  # type: ignore[attr-defined]  # callers may pass anything
        whole = sides == list(grid) and len(sides) == len(_GRID_SIDES)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        sides, whole = [], False
    if not whole:
        yield Violation("grid", f"expected (t, h, w) in whole patches, got {grid!r}")
        return
    for name, side in zip(_GRID_SIDES, sides, strict=True):
        if not 1 <= side <= _MAX_GRID_SIDE:
            yield Violation(f"grid.{name}", f"expected a positive whole number, got {side}")


def bytes_of(encoded: bytes | bytearray | memoryview) -> memoryview:
    """The bytes one by one; copied only if they are not contiguous."""
    view = memoryview(encoded)
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def _problem(tensor: object) -> str | None:
    if not isinstance(tensor, np.ndarray | TorchTensor):
        return f"expected a numpy array or a torch tensor, got {type(tensor).__name__}"
    if type_name(tensor) not in DATA_TYPES:
        return f"expected a dtype of {', '.join(DATA_TYPES)}, got {tensor.dtype}"
    if len(tensor.shape) < 2:
        return f"expected rows of values, got the shape {tuple(tensor.shape)}"
    return None


def _outline(tensor: Pixels) -> str:
    return f"{type_name(tensor)}{tuple(tensor.shape)}"
