"""Messages to items: everything a client sends is checked here, on the CPU, before it is queued."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TypeVar

import numpy as np

from vitwire import wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.caching.cache import nbytes_of
from vitwire_server.core.delivery import Consumer, MemoryKind, Region
from vitwire_server.core.errors import InvalidRequest, Violation
from vitwire_server.core.footprints import Footprints
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import CacheLookup, DType, Item, Modality, Pixels
from vitwire_server.core.models import ModelCard, Shape
from vitwire_server.preparing.files.messages import Measured
from vitwire_server.preparing.rules.forms import form_of
from vitwire_server.preparing.rules.recipe import recipes_of
from vitwire_server.rpc.deliveries import region_of, wrong_region
from vitwire_server.rpc.unprepared import Unprepared, goes_to_device, is_picture, wrong_file, wrong_picture
from vitwire_server.scheduling.tickets import Priority

DTYPES = {
    pb.DATA_TYPE_FLOAT32: DType.FLOAT32,
    pb.DATA_TYPE_FLOAT16: DType.FLOAT16,
    pb.DATA_TYPE_BFLOAT16: DType.BFLOAT16,
    pb.DATA_TYPE_UINT8: DType.UINT8,
}
_MODALITIES = {pb.MODALITY_IMAGE: Modality.IMAGE, pb.MODALITY_VIDEO: Modality.VIDEO}
_OUTPUTS: dict[int, DType] = {number: dtype for number, dtype in DTYPES.items() if dtype is not DType.UINT8}
_MAX_CONTENT_ID = 512
T = TypeVar("T")


class Codec:
    """Checks requests against the model that is served."""

    def __init__(self, card: ModelCard, footprints: Footprints) -> None:
        self._card = card
        self._footprints = footprints
        self._recipes = recipes_of(card.preprocessing, card.geometry)

    def items(self, request: wire.Request, consumer: Consumer | None = None) -> list[Item | CacheLookup | Unprepared]:
        """The items of an Encode request; `consumer` leases their regions.

        Raises InvalidRequest with every wrong field.
        """
        violations: list[Violation] = []
        message = request.message
        output = self._options(message.output_type, message.priority, violations)
        self._check_count(len(message.items), violations)
        if violations:
            raise InvalidRequest(violations)
        items = [
            self._item(f"items[{i}]", item, tensors, output, consumer, violations)
            for i, (item, tensors) in enumerate(zip(message.items, request.tensors, strict=True))
        ]
        if violations:
            raise InvalidRequest(violations)
        return [item for item in items if item is not None]

    def options(self, message: pb.EncodeStreamOptions) -> tuple[DType, Priority]:
        """Type of the rows to return on a stream, and its priority. Raises InvalidRequest."""
        violations: list[Violation] = []
        output = self._options(message.output_type, message.priority, violations)
        if violations:
            raise InvalidRequest([Violation(f"options.{v.field}", v.reason) for v in violations])
        return output, self.priority(message.priority)

    @staticmethod
    def priority(number: int) -> Priority:
        """The priority of a checked number; unspecified means interactive."""
        return Priority.BATCH if number == pb.PRIORITY_BATCH else Priority.INTERACTIVE

    def header(self, field: str, item: pb.Item, output: DType, consumer: Consumer | None = None) -> Item | CacheLookup:
        """An item that is uploaded in chunks, without its bytes. Raises InvalidRequest."""
        violations: list[Violation] = []
        header = self._header(field, item, output, consumer, violations)
        violations += [
            Violation(f"{field}.{name}.data", "must be empty: the bytes follow in chunks")
            for name, tensor in (("pixels", item.pixels), ("crops", item.crops))
            if tensor.data
        ]
        if violations:
            raise InvalidRequest(violations)
        assert header is not None, "a description without violations is complete"
        return header

    def unprepared_header(self, field: str, item: pb.Item, file_bytes: int, output: DType) -> Unprepared:
        """A file of so many bytes or a picture that is uploaded in chunks. Raises InvalidRequest."""
        violations: list[Violation] = []
        header = self._unprepared(field, item, file_bytes, output, violations)
        violations += [
            Violation(f"{field}.{name}", "must be empty: the bytes follow in chunks")
            for name, data in (("encoded", item.encoded), ("pixels.data", item.pixels.data))
            if data
        ]
        if violations or header is None:
            raise InvalidRequest(violations)
        return header

    def measured(self, field: str, item: Unprepared, found: Measured, consumer: Consumer | None) -> Item:
        """The item as it will be once it was prepared. Raises InvalidRequest."""
        message = pb.Item()
        message.CopyFrom(item.message)
        message.ClearField("pixels")
        message.pixels.data_type = pb.DATA_TYPE_UINT8
        if goes_to_device(found.picture, self._card):
            message.pixels.shape.extend(found.picture)
        else:
            message.grid.t, message.grid.h, message.grid.w = found.grid
            message.pixels.shape.extend(found.pixels)
            if found.crops:
                message.crops.data_type = pb.DATA_TYPE_UINT8
                message.crops.shape.extend(found.crops)
        header = self.header(field, message, item.output, consumer)
        assert isinstance(header, Item), "it has pixels"
        return header

    def placed(self, field: str, item: Item, region: Region, consumer: Consumer) -> Item:
        """The item with a region that followed its header. Raises InvalidRequest."""
        wrong = wrong_region(region, consumer, item.rows_nbytes(self._card.geometry.width))
        if wrong:
            raise InvalidRequest([Violation(f"{field}.{name}", reason) for name, reason in wrong])
        return replace(item, region=region, on_device=consumer.memory is MemoryKind.DEVICE)

    def is_unprepared(self, item: pb.Item, file_bytes: int) -> bool:
        """Whether a decoder must read an item: a file, or a picture that the engine does not prepare."""
        picture = is_picture(item) and not goes_to_device(tuple(item.pixels.shape), self._card)
        return bool(file_bytes or item.encoded) or picture

    def _options(self, output_type: int, priority: int, violations: list[Violation]) -> DType:
        if priority not in pb.Priority.values():
            violations.append(Violation("priority", f"{priority} is not a Priority"))
        if output_type == pb.DATA_TYPE_UNSPECIFIED:
            return self._card.dtype
        if output_type not in _OUTPUTS:
            violations.append(Violation("output_type", "must be FLOAT32, FLOAT16 or BFLOAT16"))
        return _OUTPUTS.get(output_type, self._card.dtype)

    def _check_count(self, count: int, violations: list[Violation]) -> None:
        most = self._card.limits.items_per_request
        if count == 0:
            violations.append(Violation("items", "must have at least one item"))
        elif count > most:
            violations.append(Violation("items", f"has {count} items, at most {most} are accepted"))

    def _item(
        self,
        field: str,
        item: pb.Item,
        tensors: wire.ItemTensors,
        output: DType,
        consumer: Consumer | None,
        violations: list[Violation],
    ) -> Item | CacheLookup | Unprepared | None:
        if self.is_unprepared(item, len(tensors.encoded)):
            made = self._unprepared(field, item, len(tensors.encoded), output, violations)
            data = tensors.encoded or tensors.pixels
            if made and len(data) != made.nbytes:
                reason = f"has {len(data)} bytes, shape requires {made.nbytes}"
                violations.append(Violation(f"{field}.pixels.data", reason))
            return replace(made, data=data) if made else None
        header = self._header(field, item, output, consumer, violations)
        if header is None or isinstance(header, CacheLookup):
            return header
        wrong = [
            Violation(f"{field}.{name}.data", f"has {len(data)} bytes, data_type and shape require {described.nbytes}")
            for name, data, described in (
                ("pixels", tensors.pixels, header.pixels),
                ("crops", tensors.crops, header.crops),
            )
            if described and len(data) != described.nbytes
        ]
        violations += wrong
        if wrong:
            return None
        crops = replace(header.crops, data=tensors.crops) if header.crops else None
        return replace(header, pixels=replace(header.pixels, data=tensors.pixels), crops=crops)

    def _unprepared(
        self, field: str, item: pb.Item, file_bytes: int, output: DType, violations: list[Violation]
    ) -> Unprepared | None:
        """The item without its bytes; None if it is invalid, with the reasons appended to `violations`."""
        wrong = [*self._wrong_extras(item)]
        modality = _MODALITIES.get(item.modality)
        if modality is None:
            wrong.append(Violation("modality", "must be IMAGE or VIDEO"))
        elif modality not in self._card.preprocessing:
            wrong.append(Violation("modality", f"{self._card.model_type} does not accept {modality}s"))
        picture = tuple(item.pixels.shape) if is_picture(item) and not file_bytes else None
        if picture is None:
            wrong += wrong_file(item, file_bytes, self._card.limits)
        elif modality:
            wrong += wrong_picture(item, modality, self._card)
        violations += [Violation(f"{field}.{name}", reason) for name, reason in wrong]
        if wrong or modality is None:
            return None
        return Unprepared(item, modality, output, prod(picture) if picture else file_bytes, picture)

    def _header(
        self, field: str, item: pb.Item, output: DType, consumer: Consumer | None, violations: list[Violation]
    ) -> Item | CacheLookup | None:
        """The item without its bytes; None if it is invalid, with the reasons appended to `violations`."""
        region = region_of(item)
        wrong = [*self._wrong_extras(item), *wrong_region(region, consumer, needed=0)]
        wants_cached = bool(item.content_id) and not item.HasField("pixels")
        modality = _MODALITIES.get(item.modality)
        grid = Grid(item.grid.t, item.grid.h, item.grid.w)
        if wants_cached and not wrong:
            known = grid if any(grid) else None
            return CacheLookup(item.content_id, modality, known, output, _keep_ratio(item), region, item.store_only)
        if modality is None:
            wrong.append(Violation("modality", "must be IMAGE or VIDEO"))
        elif modality not in self._card.preprocessing:
            wrong.append(Violation("modality", f"{self._card.model_type} does not accept {modality}s"))
        if is_picture(item) and modality:
            wrong += wrong_picture(item, modality, self._card)
            grid = Grid(1, 1, 1) if wrong else self._grid_of(item, modality, wrong)
            wrong += [] if wrong else list(self._wrong_grid(grid, modality))
        else:
            wrong += _wrong_type("pixels", item.pixels)
            wrong += list(self._wrong_grid(grid, modality)) or self._wrong_shapes(item, grid, modality)
        violations += [Violation(f"{field}.{name}", reason) for name, reason in wrong]
        if wrong or modality is None:
            return None
        crops = _described(item.crops) if item.HasField("crops") else None
        footprint, ratio = self._footprints(grid), _keep_ratio(item)
        pixels, on_device = _described(item.pixels), bool(region and consumer and consumer.memory is MemoryKind.DEVICE)
        made = Item(
            modality,
            grid,
            pixels,
            footprint,
            output,
            ratio,
            crops,
            item.content_id,
            region,
            on_device=on_device,
            store_only=item.store_only,
            is_picture=is_picture(item),
        )
        nbytes, cached = made.rows_nbytes(self._card.geometry.width), self._card.limits.cached_bytes
        wrong = wrong_region(region, consumer, nbytes)
        if item.store_only and (taken := nbytes_of(nbytes, item.content_id)) > cached:
            wrong.append(Violation("store_only", f"the rows would take {taken} bytes of the cache, which has {cached}"))
        violations += [Violation(f"{field}.{name}", reason) for name, reason in wrong]
        return None if wrong else made

    def _grid_of(self, item: pb.Item, modality: Modality, violations: list[Violation]) -> Grid:
        """The grid that a checked picture will have."""
        try:
            return Grid(*form_of(tuple(item.pixels.shape), self._recipes[modality]).grid)
        except ValueError as error:
            violations.append(Violation("pixels", str(error)))
            return Grid(1, 1, 1)

    def _wrong_grid(self, grid: Grid, modality: Modality | None) -> Iterator[Violation]:
        geometry = self._card.geometry
        for name, value in zip("thw", grid, strict=True):
            if value < 1:
                yield Violation(f"grid.{name}", "must be positive")
        for name, reason in geometry.wrong(grid, modality):
            yield Violation(f"grid.{name}" if name else "grid", reason)
        most, patches = self._card.limits.patches_per_item, geometry.patches(grid)
        if patches > most:
            yield Violation("grid", f"has {patches} patches, at most {most} are accepted")

    def _wrong_shapes(self, item: pb.Item, grid: Grid, modality: Modality | None) -> Iterator[Violation]:
        geometry = self._card.geometry
        yield from _wrong_shape("pixels", item.pixels, grid, geometry.shapes(grid, modality or Modality.IMAGE))
        crops = geometry.crops(grid)
        if crops is None and item.HasField("crops"):
            scope = f"for grid {grid}" if geometry.crop_row else "at all"
            yield Violation("crops", f"{self._card.model_type} takes no crops {scope}")
        elif crops is not None and not item.HasField("crops"):
            yield Violation("crops", f"is missing: must be {list(crops)} for grid {grid}")
        elif crops is not None:
            yield from _wrong_type("crops", item.crops)
            yield from _wrong_shape("crops", item.crops, grid, [crops])

    def _wrong_extras(self, item: pb.Item) -> Iterator[Violation]:
        if not 0 <= item.keep_ratio <= 1:
            yield Violation("keep_ratio", f"must be in [0, 1], got {item.keep_ratio:g}")
        elif item.keep_ratio and item.modality == pb.MODALITY_IMAGE:
            yield Violation("keep_ratio", "must be 0 for an image: only videos are pruned")
        elif item.keep_ratio and not self._card.geometry.prunes:
            several = f"tokens of {self._card.model_type} span several frames"
            pooled = f"each frame has one row, as the server runs with --pooling {self._card.pooling}"
            yield Violation("keep_ratio", f"must be 0: {pooled if self._card.geometry.one_row else several}")
        if len(item.content_id) > _MAX_CONTENT_ID:
            yield Violation("content_id", f"must have at most {_MAX_CONTENT_ID} characters")
        if item.store_only:
            yield from self._wrong_store(item)

    def _wrong_store(self, item: pb.Item) -> Iterator[Violation]:
        if not item.content_id:
            yield Violation("content_id", "is missing: the rows of a store_only item are cached under it")
        if not self._card.limits.cached_bytes:
            yield Violation("store_only", "must be false: the server has no cache (--cache-bytes)")
        if item.HasField("region"):
            yield Violation("store_only", "must be false for an item with a region")


def _wrong_type(name: str, tensor: pb.Tensor) -> Iterator[Violation]:
    if tensor.data_type not in DTYPES:
        yield Violation(f"{name}.data_type", "must be FLOAT32, FLOAT16, BFLOAT16 or UINT8")


def _wrong_shape(name: str, tensor: pb.Tensor, grid: Grid, accepted: Sequence[Shape]) -> Iterator[Violation]:
    shape = tuple(tensor.shape)
    if shape not in accepted:
        options = " or ".join(str(list(option)) for option in accepted)
        given = f"{list(shape[:4])}" + ("..." if len(shape) > 4 else "")
        yield Violation(f"{name}.shape", f"must be {options} for grid {grid}, got {given}")


def _described(tensor: pb.Tensor) -> Pixels:
    """A tensor of a checked type and shape, without its bytes."""
    return Pixels(b"", DTYPES[tensor.data_type], tuple(tensor.shape))


def _keep_ratio(item: pb.Item) -> float:
    """The decimal that the client wrote, so that 0.7 of 10 tokens are 7; 1 is the same as 0: no pruning."""
    ratio = float(str(np.float32(item.keep_ratio)))
    return ratio if ratio < 1 else 0.0


def parsed(message: T | wire.Malformed) -> T:
    """A message that was parsed. Raises InvalidRequest for one that could not be."""
    if isinstance(message, wire.Malformed):
        raise InvalidRequest([Violation("message", f"is not a valid protobuf message: {message.reason}")])
    return message
