"""Messages to items: everything a client sends is checked here, on the host, before it is queued."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from vitwire import wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.errors import InvalidRequest, NotCached, Violation
from vitwire_server.core.grids import Footprint, Grid, retained
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.core.models import ModelCard
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


@dataclass(frozen=True, slots=True)
class Header:
    """An item whose description was checked, before its bytes are there."""

    modality: Modality
    grid: Grid
    dtype: DType
    shape: tuple[int, int]
    footprint: Footprint
    keep_ratio: float

    @property
    def rows(self) -> int:
        """Rows to return."""
        return retained(self.footprint.tokens, self.grid.t, self.keep_ratio)

    @property
    def nbytes(self) -> int:
        """Bytes of pixels that the description asks for."""
        return self.shape[0] * self.shape[1] * self.dtype.size

    def item(self, data: wire.Buffer, output: DType) -> Item:
        """The item, once its `nbytes` bytes are there."""
        pixels = Pixels(data, self.dtype, self.shape)
        return Item(self.modality, self.grid, pixels, self.footprint, output, self.keep_ratio)


class Codec:
    """Checks requests against the model that is served."""

    def __init__(self, card: ModelCard, footprint: Callable[[Grid], Footprint]) -> None:
        self._card = card
        self._footprint = footprint

    def weight(self, item: Item | Header, output: DType) -> int:
        """Bytes that an item holds on the host from admission to its answer: pixels, then rows."""
        nbytes = item.nbytes if isinstance(item, Header) else item.pixels.nbytes
        return nbytes + item.rows * self._card.geometry.width * output.size

    def items(self, request: wire.Request) -> list[Item | NotCached]:
        """The items of an Encode request. Raises InvalidRequest with every wrong field."""
        violations: list[Violation] = []
        message = request.message
        output = self._options(message.output_type, message.priority, violations)
        self._check_count(len(message.items), violations)
        if violations:
            raise InvalidRequest(violations)
        items = [
            self._item(f"items[{i}]", item, tensors, output, violations)
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
        """The priority that a checked number stands for; unspecified means interactive."""
        return Priority.BATCH if number == pb.PRIORITY_BATCH else Priority.INTERACTIVE

    def header(self, field: str, item: pb.Item) -> Header:
        """The description of an item that is uploaded in chunks. Raises InvalidRequest or NotCached."""
        violations: list[Violation] = []
        header = self._header(field, item, violations)
        if item.pixels.data:
            violations.append(Violation(f"{field}.pixels.data", "must be left out, the bytes follow in chunks"))
        if violations:
            raise InvalidRequest(violations)
        if isinstance(header, NotCached):
            raise header
        assert header is not None, "a description that breaks no rule is complete"
        return header

    def _options(self, output_type: int, priority: int, violations: list[Violation]) -> DType:
        if priority not in pb.Priority.values():
            violations.append(Violation("priority", f"{priority} is no Priority"))
        if output_type == pb.DATA_TYPE_UNSPECIFIED:
            return self._card.dtype
        if output_type not in _OUTPUTS:
            violations.append(Violation("output_type", "must be FLOAT32, FLOAT16 or BFLOAT16"))
        return _OUTPUTS.get(output_type, self._card.dtype)

    def _check_count(self, count: int, violations: list[Violation]) -> None:
        most = self._card.limits.items_per_request
        if count == 0:
            violations.append(Violation("items", "must hold at least one item"))
        elif count > most:
            violations.append(Violation("items", f"holds {count} items, at most {most} are accepted"))

    def _item(
        self, field: str, item: pb.Item, tensors: wire.ItemTensors, output: DType, violations: list[Violation]
    ) -> Item | NotCached | None:
        header = self._header(field, item, violations)
        if header is None or isinstance(header, NotCached):
            return header
        if len(tensors.pixels) != header.nbytes:
            reason = f"has {len(tensors.pixels)} bytes, type and shape ask for {header.nbytes}"
            violations.append(Violation(f"{field}.pixels.data", reason))
            return None
        return header.item(tensors.pixels, output)

    def _header(self, field: str, item: pb.Item, violations: list[Violation]) -> Header | NotCached | None:
        """The checked description; None if it broke a rule, which is then in `violations`."""
        wrong = list(self._wrong_extras(item))
        wants_cached = bool(item.content_id) and not item.HasField("pixels")
        if wants_cached and not wrong:
            return NotCached(f"{field}: no embedding of content_id {item.content_id!r} is cached")
        modality = _MODALITIES.get(item.modality)
        dtype = DTYPES.get(item.pixels.data_type)
        grid = Grid(item.grid.t, item.grid.h, item.grid.w)
        if modality is None:
            wrong.append(Violation("modality", "must be IMAGE or VIDEO"))
        if dtype is None:
            wrong.append(Violation("pixels.data_type", "must be FLOAT32, FLOAT16, BFLOAT16 or UINT8"))
        wrong += list(self._wrong_grid(grid, modality)) or self._wrong_shape(tuple(item.pixels.shape), grid, modality)
        violations += [Violation(f"{field}.{name}", reason) for name, reason in wrong]
        if wrong or modality is None or dtype is None:
            return None
        rows, columns = item.pixels.shape
        return Header(modality, grid, dtype, (rows, columns), self._footprint(grid), _keep_ratio(item))

    def _wrong_grid(self, grid: Grid, modality: Modality | None) -> Iterator[Violation]:
        merge = self._card.geometry.merge
        for name, value in zip("thw", grid, strict=True):
            if value < 1:
                yield Violation(f"grid.{name}", "must be positive")
            elif name != "t" and value % merge:
                yield Violation(f"grid.{name}", f"must be a multiple of the merge size {merge}, got {value}")
        if modality is Modality.IMAGE and grid.t > 1:
            yield Violation("grid.t", f"must be 1 for an image, got {grid.t}")
        most = self._card.limits.patches_per_item
        if grid.patches > most:
            yield Violation("grid", f"has {grid.patches} patches, at most {most} are accepted")

    def _wrong_shape(self, shape: tuple[int, ...], grid: Grid, modality: Modality | None) -> Iterator[Violation]:
        geometry = self._card.geometry
        full = (grid.patches, geometry.columns(frames=geometry.temporal))
        single = (grid.patches, geometry.columns(frames=1))
        accepted = [full] if modality is Modality.VIDEO else [full, single]
        if shape not in accepted:
            told = " or ".join(str(list(option)) for option in accepted)
            given = f"{list(shape[:4])}" + ("..." if len(shape) > 4 else "")
            yield Violation("pixels.shape", f"must be {told} for grid {grid}, got {given}")

    def _wrong_extras(self, item: pb.Item) -> Iterator[Violation]:
        if item.HasField("crops"):
            yield Violation("crops", f"{self._card.model_type} takes no second view")
        if not 0 <= item.keep_ratio <= 1:
            yield Violation("keep_ratio", f"must be in [0, 1], got {item.keep_ratio:g}")
        elif item.keep_ratio and item.modality == pb.MODALITY_IMAGE:
            yield Violation("keep_ratio", "must be 0 for an image: only videos are pruned")
        if len(item.content_id) > _MAX_CONTENT_ID:
            yield Violation("content_id", f"must have at most {_MAX_CONTENT_ID} characters")


def _keep_ratio(item: pb.Item) -> float:
    """The decimal that the client wrote, so that 0.7 of 10 tokens are 7; all of them is pruning switched off."""
    ratio = float(str(np.float32(item.keep_ratio)))
    return ratio if ratio < 1 else 0.0


def raise_if_malformed(message: wire.Malformed | object) -> None:
    """Raises InvalidRequest for a message that did not parse."""
    if isinstance(message, wire.Malformed):
        raise InvalidRequest([Violation("message", f"is no valid protobuf message: {message.reason}")])
