"""Messages to items: everything a client sends is checked here, on the CPU, before it is queued."""

from dataclasses import replace
from functools import lru_cache
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
from vitwire_server.core.models import ModelCard
from vitwire_server.preparing.files.messages import Measured
from vitwire_server.preparing.rules.forms import form_of
from vitwire_server.preparing.rules.recipe import recipes_of
from vitwire_server.rpc import checks
from vitwire_server.rpc.checks import MODALITIES, refuse, region_of, wrong_region
from vitwire_server.rpc.file_items import Unprepared, areas_of, goes_to_device, is_picture
from vitwire_server.scheduling.tickets import Priority

T = TypeVar("T")
_HEADERS, _HEADER_BYTES = 1024, 128
"""Headers that are kept, and the bytes of one at most: most images have one of few sizes."""


class Codec:
    """Checks requests against the model that is served."""

    def __init__(self, card: ModelCard, footprints: Footprints) -> None:
        self._card = card
        self._footprints = footprints
        self._recipes = recipes_of(card.preprocessing, card.geometry)
        self._repeated = lru_cache(_HEADERS)(self._parsed)

    def items(self, request: wire.Request, consumer: Consumer | None = None) -> list[Item | CacheLookup | Unprepared]:
        """The items of an Encode request; `consumer` leases their regions.

        Raises InvalidRequest with every wrong field.
        """
        message = request.message
        count, most = len(message.items), self._card.limits.items_per_request
        wrong = list(checks.wrong_options(message))
        if not 1 <= count <= most:
            reason = f"has {count} items, at most {most} are accepted" if count else "must have at least one item"
            wrong.append(Violation("items", reason))
        refuse(wrong)
        output = self._output(message.output_type)
        items = []
        for index, (item, tensors) in enumerate(zip(message.items, request.tensors, strict=True)):
            try:
                items.append(self._item(f"items[{index}]", item, tensors, output, consumer))
            except InvalidRequest as error:
                wrong += error.violations
        refuse(wrong)
        return items

    def options(self, message: pb.EncodeStreamOptions) -> tuple[DType, Priority]:
        """Type of the rows to return on a stream, and its priority. Raises InvalidRequest."""
        refuse(list(checks.wrong_options(message)), "options")
        return self._output(message.output_type), priority(message.priority)

    def measured(self, field: str, item: Unprepared, found: Measured, consumer: Consumer | None) -> Item:
        """The item as it will be once it was prepared. Raises InvalidRequest."""
        message = pb.Item()
        message.CopyFrom(item.message)
        message.ClearField("pixels")
        message.pixels.data_type = pb.DATA_TYPE_UINT8
        message.options.ClearField("frames")  # which were chosen
        if goes_to_device(found.picture, self._card):
            message.pixels.shape.extend(found.picture)
        else:
            message.ClearField("options")
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
        refuse(wrong_region(region, consumer, item.rows_nbytes(self._card.geometry.width)), field)
        return replace(item, region=region, on_device=consumer.memory is MemoryKind.DEVICE)

    def is_unprepared(self, item: pb.Item, file_bytes: int) -> bool:
        """Whether a decoder must read an item: a file, or a picture that the engine does not prepare."""
        picture = is_picture(item) and not goes_to_device(tuple(item.pixels.shape), self._card)
        return bool(file_bytes or item.encoded) or picture

    def _output(self, number: int) -> DType:
        return checks.OUTPUTS.get(number, self._card.dtype)

    def _item(
        self, field: str, item: pb.Item, tensors: wire.ItemTensors, output: DType, consumer: Consumer | None
    ) -> Item | CacheLookup | Unprepared:
        """The item with its bytes. Raises InvalidRequest."""
        if self.is_unprepared(item, len(tensors.encoded)):
            made = self.unprepared(field, item, len(tensors.encoded), output)
            data = tensors.encoded or tensors.pixels
            if len(data) != made.nbytes:
                refuse([Violation("pixels.data", f"has {len(data)} bytes, shape requires {made.nbytes}")], field)
            return replace(made, data=data)
        if item.content_id or item.HasField("region") or item.ByteSize() > _HEADER_BYTES:
            header = self.header(field, item, output, consumer)
        else:
            header = self._repeated(field, item.SerializeToString(), output)
        if isinstance(header, CacheLookup):
            return header
        parts = (("pixels", tensors.pixels, header.pixels), ("crops", tensors.crops, header.crops))
        wrong = [
            Violation(f"{name}.data", f"has {len(data)} bytes, data_type and shape require {described.nbytes}")
            for name, data, described in parts
            if described and len(data) != described.nbytes
        ]
        refuse(wrong, field)
        crops = replace(header.crops, data=tensors.crops) if header.crops else None
        return replace(header, pixels=replace(header.pixels, data=tensors.pixels), crops=crops)

    def unprepared(self, field: str, item: pb.Item, file_bytes: int, output: DType) -> Unprepared:
        """A file of `file_bytes` bytes or a picture, without its bytes. Raises InvalidRequest."""
        wrong = [*checks.wrong_extras(item, self._card), *checks.wrong_modality(item, self._card)]
        modality = MODALITIES.get(item.modality)
        picture = tuple(item.pixels.shape) if is_picture(item) and not file_bytes else None
        if picture is None:
            wrong += checks.wrong_file(item, file_bytes, self._card.limits)
        elif modality:
            wrong += checks.wrong_picture(item, modality, self._card)
        wrong += checks.wrong_processor_options(item, self._card, is_prepared=True)
        refuse(wrong, field)
        assert modality, "it was checked"
        nbytes = prod(picture) if picture else file_bytes
        frames = tuple(item.options.frames)
        return Unprepared(item, modality, output, nbytes, picture, areas_of(item, self._card), frames)

    def _parsed(self, field: str, raw: bytes, output: DType) -> Item | CacheLookup:
        return self.header(field, pb.Item.FromString(raw), output)

    def header(self, field: str, item: pb.Item, output: DType, consumer: Consumer | None = None) -> Item | CacheLookup:
        """An item without its bytes. Raises InvalidRequest."""
        card, region = self._card, region_of(item)
        wrong = [*checks.wrong_extras(item, card), *wrong_region(region, consumer, needed=0)]
        wrong += checks.wrong_processor_options(item, card, is_prepared=is_picture(item))
        modality = MODALITIES.get(item.modality)
        grid = Grid(item.grid.t, item.grid.h, item.grid.w)
        if item.content_id and not item.HasField("pixels") and not wrong:
            known = grid if any(grid) else None
            return CacheLookup(item.content_id, modality, known, output, _keep_ratio(item), region, item.store_only)
        wrong += checks.wrong_modality(item, card)
        if is_picture(item) and modality:
            wrong += checks.wrong_picture(item, modality, card)
            refuse(wrong, field)
            try:
                recipe = self._recipes[modality].within(areas_of(item, card))
                grid = Grid(*form_of(tuple(item.pixels.shape), recipe).grid)
            except ValueError as error:
                refuse([Violation("pixels", str(error))], field)
            wrong += checks.wrong_grid(grid, modality, card)
        else:
            wrong += checks.wrong_type("pixels", item.pixels)
            wrong += list(checks.wrong_grid(grid, modality, card)) or checks.wrong_shapes(item, grid, modality, card)
        refuse(wrong, field)
        assert modality, "it was checked"
        made = Item(
            modality,
            grid,
            _described(item.pixels),
            self._footprints(grid),
            output,
            _keep_ratio(item),
            _described(item.crops) if item.HasField("crops") else None,
            item.content_id,
            region,
            on_device=bool(region and consumer and consumer.memory is MemoryKind.DEVICE),
            store_only=item.store_only,
            is_picture=is_picture(item),
            areas=areas_of(item, card),
            in_groups=item.in_groups and card.clip_groups and modality is Modality.VIDEO,
        )
        nbytes, cached = made.rows_nbytes(card.geometry.width), card.limits.cached_bytes
        wrong = wrong_region(region, consumer, nbytes)
        if item.store_only and (taken := nbytes_of(nbytes, item.content_id)) > cached:
            wrong.append(Violation("store_only", f"the rows would take {taken} bytes of the cache, which has {cached}"))
        refuse(wrong, field)
        return made


def priority(number: int) -> Priority:
    """The priority of a checked number; unspecified means interactive."""
    return Priority.BATCH if number == pb.PRIORITY_BATCH else Priority.INTERACTIVE


def _described(tensor: pb.Tensor) -> Pixels:
    """A tensor of a checked type and shape, without its bytes."""
    return Pixels(b"", checks.DTYPES[tensor.data_type], tuple(tensor.shape))


def _keep_ratio(item: pb.Item) -> float:
    """The decimal that the client wrote, so that 0.7 of 10 tokens are 7; 1 is the same as 0: no pruning."""
    if not item.keep_ratio:
        return 0.0
    ratio = float(str(np.float32(item.keep_ratio)))
    return ratio if ratio < 1 else 0.0


def parsed(message: T | wire.Malformed) -> T:
    """A message that was parsed. Raises InvalidRequest for one that could not be."""
    if isinstance(message, wire.Malformed):
        raise InvalidRequest([Violation("message", f"is not a valid protobuf message: {message.reason}")])
    return message
