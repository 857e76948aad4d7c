"""Checks of requests, field by field. Fields of an item are named within the item."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

from google.protobuf.unknown_fields import UnknownFieldSet

from vitwire.shared.agents import problem_of
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.delivery import Consumer, MemoryKind, Region
from vitwire_server.core.errors import InvalidRequest, Violation
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Modality
from vitwire_server.core.models import Limits, ModelCard, Shape
from vitwire_server.preparing.files.messages import MOST_FRAMES
from vitwire_server.rpc.file_items import AXES_OF_CLIP, AXES_OF_IMAGE, RGB, RGBA, is_picture, picture_bytes

DTYPES = {
    pb.DATA_TYPE_FLOAT32: DType.FLOAT32,
    pb.DATA_TYPE_FLOAT16: DType.FLOAT16,
    pb.DATA_TYPE_BFLOAT16: DType.BFLOAT16,
    pb.DATA_TYPE_UINT8: DType.UINT8,
}
OUTPUTS: dict[int, DType] = {number: dtype for number, dtype in DTYPES.items() if dtype is not DType.UINT8}
MODALITIES = {pb.MODALITY_IMAGE: Modality.IMAGE, pb.MODALITY_VIDEO: Modality.VIDEO}
_MEMORY_KINDS = {pb.MEMORY_KIND_HOST: MemoryKind.HOST, pb.MEMORY_KIND_DEVICE: MemoryKind.DEVICE}
_PRIORITIES = frozenset(pb.Priority.values())
_MAX_CONTENT_ID = 512


def refuse(wrong: Sequence[Violation], field: str = "") -> None:
    """Raises InvalidRequest if anything is wrong; with `field`, the violations are within that field."""
    if wrong:
        raise InvalidRequest(
            [Violation(f"{field}.{name}", reason) if field else Violation(name, reason) for name, reason in wrong]
        )


def violations(*cases: tuple[str, str, object]) -> list[Violation]:
    """Field and reason of the cases that are true."""
    return [Violation(field, reason) for field, reason, is_so in cases if is_so]


def wrong_options(message: pb.EncodeRequest | pb.EncodeStreamOptions) -> Iterator[Violation]:
    """Priority and type of the rows to return."""
    if message.priority not in _PRIORITIES:
        yield Violation("priority", f"{message.priority} is not a Priority")
    if message.output_type not in OUTPUTS and message.output_type != pb.DATA_TYPE_UNSPECIFIED:
        yield Violation("output_type", "must be FLOAT32, FLOAT16 or BFLOAT16")


def wrong_modality(item: pb.Item, card: ModelCard) -> Iterator[Violation]:
    modality = MODALITIES.get(item.modality)
    if modality is None:
        yield Violation("modality", "must be IMAGE or VIDEO")
    elif modality not in card.preprocessing:
        yield Violation("modality", f"{card.model_type} does not accept {modality}s")


def wrong_extras(item: pb.Item, card: ModelCard) -> Iterator[Violation]:
    """What any kind of item may have: bytes that come separately, pruning, its name, storing."""
    separate = "must be empty: the bytes follow in chunks"
    yield from violations(
        ("encoded", separate, item.encoded),
        ("pixels.data", separate, item.pixels.data),
        ("crops.data", separate, item.crops.data),
    )
    if not 0 <= item.keep_ratio <= 1:
        yield Violation("keep_ratio", f"must be in [0, 1], got {item.keep_ratio:g}")
    elif item.keep_ratio and item.modality == pb.MODALITY_IMAGE:
        yield Violation("keep_ratio", "must be 0 for an image: only videos are pruned")
    elif item.keep_ratio and not card.geometry.prunes:
        several = f"tokens of {card.model_type} span several frames"
        pooled = f"each frame has one vector, as the server runs with --pooling {card.pooling}"
        yield Violation("keep_ratio", f"must be 0: {pooled if card.geometry.one_row else several}")
    store, cache = item.store_only, card.limits.cached_bytes
    yield from violations(
        ("content_id", f"must have at most {_MAX_CONTENT_ID} characters", len(item.content_id) > _MAX_CONTENT_ID),
        (
            "content_id",
            "is missing: the embedding of a store_only item is cached under it",
            store and not item.content_id,
        ),
        ("store_only", "must be false: the server has no cache (--cache-bytes)", store and not cache),
        ("store_only", "must be false for an item with a region", store and item.HasField("region")),
    )


def wrong_grid(grid: Grid, modality: Modality | None, card: ModelCard) -> Iterator[Violation]:
    geometry = card.geometry
    for name, value in zip("thw", grid, strict=True):
        if value < 1:
            yield Violation(f"grid.{name}", "must be positive")
    for name, reason in geometry.wrong(grid, modality):
        yield Violation(f"grid.{name}" if name else "grid", reason)
    most, patches = card.limits.patches_per_item, geometry.patches(grid)
    if patches > most:
        yield Violation("grid", f"has {patches} patches, at most {most} are accepted")


def wrong_shapes(item: pb.Item, grid: Grid, modality: Modality | None, card: ModelCard) -> Iterator[Violation]:
    """The shapes of an item's tensors."""
    geometry = card.geometry
    yield from _wrong_shape("pixels", item.pixels, grid, geometry.shapes(grid, modality or Modality.IMAGE))
    crops = geometry.crops(grid)
    if crops is None and item.HasField("crops"):
        scope = f"for grid {grid}" if geometry.crop_row else "at all"
        yield Violation("crops", f"{card.model_type} takes no crops {scope}")
    elif crops is not None and not item.HasField("crops"):
        yield Violation("crops", f"is missing: must be {list(crops)} for grid {grid}")
    elif crops is not None:
        yield from wrong_type("crops", item.crops)
        yield from _wrong_shape("crops", item.crops, grid, [crops])


def wrong_type(name: str, tensor: pb.Tensor) -> Iterator[Violation]:
    if tensor.data_type not in DTYPES:
        yield Violation(f"{name}.data_type", "must be FLOAT32, FLOAT16, BFLOAT16 or UINT8")


def _wrong_shape(name: str, tensor: pb.Tensor, grid: Grid, accepted: Sequence[Shape]) -> Iterator[Violation]:
    shape = tuple(tensor.shape)
    if shape not in accepted:
        options = " or ".join(str(list(option)) for option in accepted)
        given = f"{list(shape[:4])}" + ("..." if len(shape) > 4 else "")
        yield Violation(f"{name}.shape", f"must be {options} for grid {grid}, got {given}")


def wrong_file(item: pb.Item, nbytes: int, limits: Limits) -> Iterator[Violation]:
    most = limits.encoded_bytes
    if not most:
        yield Violation("encoded", "is not accepted: this server prepares no files; send pixels")
    elif nbytes > most:
        yield Violation("encoded", f"has {nbytes} bytes, at most {most} are accepted")
    yield from violations(
        ("encoded", "must be empty if the item has pixels", item.HasField("pixels")),
        ("crops", "must be absent: the server makes the crops of a file", item.HasField("crops")),
        ("grid", "must be absent: the server chooses the grid of a file", item.HasField("grid")),
    )


_MOST_OPTION_BYTES = 5 * MOST_FRAMES + 64
"""Five bytes hold any index of a frame."""


def wrong_processor_options(item: pb.Item, card: ModelCard, *, is_prepared: bool) -> Iterator[Violation]:
    """Options of an item; only images that are prepared here, and files of clips, have any."""
    nbytes, frames = item.options.ByteSize(), item.options.frames
    if not nbytes:
        return
    if nbytes > _MOST_OPTION_BYTES or len(frames) > MOST_FRAMES:  # looking at each would hold up everyone
        yield Violation("options.frames", f"has {len(frames)} frames, {nbytes} bytes; at most {MOST_FRAMES} frames")
        return
    yield from violations(
        ("options", "has fields that this server does not know", len(UnknownFieldSet(item.options))),
    )
    given = {field.name: value for field, value in item.options.ListFields()}
    if item.modality == pb.MODALITY_VIDEO and is_prepared and given.keys() == {"frames"} and not is_picture(item):
        yield from violations(
            ("options.frames", f"is not an option of {card.model_type} here", "frames" not in card.options),
            ("options.frames", "must be ascending", any(one >= other for one, other in pairwise(frames))),
        )
        return
    if not is_prepared or item.modality != pb.MODALITY_IMAGE or "frames" in given:
        yield Violation(
            "options", "must be absent, but for files and pictures of images, and `frames` of a clip's file"
        )
        return
    most = card.limits.patches_per_item * card.geometry.row // card.geometry.channels
    for name, value in given.items():
        if name not in card.options:
            yield Violation(f"options.{name}", f"is not an option of {card.model_type}")
        elif value < 1:
            yield Violation(f"options.{name}", f"must be positive, got {value}")
    least, largest = given.get("min_pixels", 1), given.get("max_pixels", most)
    yield from violations(
        ("options.min_pixels", f"{least} exceeds {most}, the largest min_pixels here", least > most),
        ("options.max_pixels", f"{largest} is less than min_pixels, {least}", 0 < largest < least <= most),
    )


def wrong_picture(item: pb.Item, modality: Modality, card: ModelCard) -> Iterator[Violation]:
    shape, limits = tuple(item.pixels.shape), card.limits
    axes = AXES_OF_CLIP if modality is Modality.VIDEO else AXES_OF_IMAGE
    if item.HasField("crops"):
        yield Violation("crops", "must be absent: the server makes the crops of a picture")
    if modality not in card.prepared:
        yield Violation("grid", "is missing, and this server prepares no pictures of this modality")
    elif len(shape) != axes or shape[-1] not in (RGB, RGBA) or item.pixels.data_type != pb.DATA_TYPE_UINT8:
        layout = "(frames, height, width, 3 or 4)" if modality is Modality.VIDEO else "(height, width, 3 or 4)"
        given = f"{list(shape[:4])}" + ("..." if len(shape) > 4 else "")
        yield Violation("grid", f"is missing: only pictures have none, UINT8 of shape {layout}; got pixels {given}")
    elif min(shape) < 1:
        yield Violation("pixels.shape", f"must have at least one pixel, got {list(shape)}")
    elif shape[-3] * shape[-2] > limits.encoded_pixels:
        size = f"{shape[-2]}x{shape[-3]}"
        yield Violation("pixels.shape", f"is a picture of {size}, the limit is {limits.encoded_pixels} pixels")
    elif prod(shape) > picture_bytes(limits):
        yield Violation("pixels.shape", f"takes {prod(shape)} bytes, at most {picture_bytes(limits)} are accepted")


def consumer_of(message: pb.EncodeRequest | pb.EncodeStreamOptions, principal: str, field: str) -> Consumer | None:
    """The consumer of an RPC; None if its rows come in the response. Raises InvalidRequest."""
    if not message.HasField("delivery"):
        return None
    delivery = message.delivery
    kind = _MEMORY_KINDS.get(delivery.memory)
    consumer = Consumer(
        principal,
        delivery.agent,
        delivery.agent_metadata,
        kind or MemoryKind.HOST,
        delivery.device,
        delivery.address,
        delivery.bytes,
    )
    wrong = {
        "memory": None if kind else "must be HOST or DEVICE",
        "agent": problem_of(delivery.agent, delivery.agent_metadata),
        "address": consumer.problem(),
    }
    refuse([Violation(name, reason) for name, reason in wrong.items() if reason], field)
    return consumer


def region_of(item: pb.Item | pb.EncodeStreamRegion) -> Region | None:
    """The region of an item, unchecked."""
    return Region(item.region.offset, item.region.bytes) if item.HasField("region") else None


def wrong_region(region: Region | None, consumer: Consumer | None, needed: int) -> list[Violation]:
    """The region of an item whose rows have `needed` bytes."""
    if region is None:
        return []
    reason = region.problem(consumer, needed) if consumer else "needs a delivery in the request"
    return [Violation("region", reason)] if reason else []
