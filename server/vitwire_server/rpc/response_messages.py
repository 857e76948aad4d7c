"""Outcomes to messages: chunks of rows, reports and per-item errors."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import NamedTuple, TypeVar

from vitwire import wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.delivery import Delivered, NotDelivered, Stored
from vitwire_server.core.errors import EncoderError
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Encoding, ModelCard, Preparation
from vitwire_server.core.pooling import Pooling
from vitwire_server.core.reports import Accepted, Encoded, ItemReport, Outcome, Path
from vitwire_server.core.tilings import TilingRule
from vitwire_server.rpc.checks import DTYPES
from vitwire_server.rpc.file_items import Prepared
from vitwire_server.rpc.status import duration, status_of

Answer = TypeVar("Answer", pb.EncodeResponse, pb.EncodeStreamResponse)

CHUNK_BYTES = 2 << 20
"""Rows of a message. Half of what gRPC clients accept by default; the rows of a 224² image are one message."""
_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
_POOLINGS = {pooling: pb.Pooling.Value(f"POOLING_{pooling.name}") for pooling in Pooling}
_ENCODINGS = {kind: pb.Encoding.Value(f"ENCODING_{kind.name}") for kind in Encoding}
_MODALITIES = {kind: pb.Modality.Value(f"MODALITY_{kind.name}") for kind in Modality}
_PATHS = {Path.GRAPH: pb.PATH_GRAPH, Path.EAGER: pb.PATH_EAGER, Path.CACHE: pb.PATH_CACHE}


class Outgoing(NamedTuple):
    """A serialised message of an answer."""

    raw: bytes
    rows_bytes: int
    last: bool
    """Whether it completes the answer to its item."""


def accepted_message(kind: type[Answer], item: int, accepted: Accepted, prepared: Prepared | None = None) -> Outgoing:
    """The message that precedes the answer to an item whose rows are only stored."""
    t, h, w = accepted.grid
    message = pb.Accepted(
        grid=pb.Grid(t=t, h=h, w=w),
        tokens=accepted.tokens,
        forecast=duration(accepted.forecast),
        frame_seconds=prepared.frame_seconds if prepared else (),
        second_per_grid=prepared.second_per_grid if prepared else 0.0,
    )
    return Outgoing(kind(item=item, accepted=message).SerializeToString(), 0, last=False)


def messages(kind: type[Answer], item: int, outcome: Outcome, prepared: Prepared | None = None) -> Iterator[Outgoing]:
    """The messages that answer one item: its rows in chunks of about 2 MiB, their placement, or its error.

    `prepared` is what was chosen for an encoded item. Each message is serialised when it is taken, so that the rows are
    never held a second time as a whole.
    """
    if isinstance(outcome, EncoderError):
        message = kind(item=item, error=status_of(outcome))
    elif isinstance(outcome.delivery, Stored):
        stored = pb.EmbeddingStored(data_type=_NUMBERS[outcome.embedding.dtype], shape=outcome.embedding.shape)
        message = kind(item=item, report=_report(outcome, prepared), stored=stored)
    elif isinstance(outcome.delivery, Delivered):
        offset, nbytes = outcome.delivery.region.offset, outcome.embedding.nbytes
        number, shape = _NUMBERS[outcome.embedding.dtype], outcome.embedding.shape
        placement = pb.EmbeddingPlacement(offset=offset, bytes=nbytes, data_type=number, shape=shape)
        message = kind(item=item, report=_report(outcome, prepared), placement=placement)
    else:
        yield from _chunks(kind, item, outcome, prepared)
        return
    yield Outgoing(message.SerializeToString(), 0, last=True)


def _chunks(kind: type[Answer], item: int, outcome: Encoded, prepared: Prepared | None) -> Iterator[Outgoing]:
    embedding = outcome.embedding
    rows, width = embedding.shape
    row_bytes = width * embedding.dtype.size
    step = max(1, CHUNK_BYTES // row_bytes)
    start, end = outcome.new or (0, rows)
    chunk = pb.EmbeddingChunk(data_type=_NUMBERS[embedding.dtype], shape=embedding.shape)
    for row in range(start, end, step):
        stop = min(row + step, end)
        chunk.row, chunk.last = row, stop == rows
        rest = kind(item=item, report=_report(outcome, prepared) if chunk.last else None)
        data = embedding.data[row * row_bytes : stop * row_bytes]
        yield Outgoing(
            wire.join_chunk(rest.SerializeToString(), chunk.SerializeToString(), data), len(data), chunk.last
        )


def _report(outcome: Encoded, prepared: Prepared | None) -> pb.ItemReport:
    report: ItemReport = outcome.report
    grid = prepared.grid if prepared else report.grid
    return pb.ItemReport(
        path=_PATHS[report.path],
        fallback_reason=report.fallback or "",
        budget_tokens=report.budget_tokens,
        tokens=report.tokens,
        queued=duration(report.queued),
        encoded=duration(report.encoded),
        kept=outcome.embedding.kept,
        grid=pb.Grid(t=grid[0], h=grid[1], w=grid[2]) if grid else None,
        frame_seconds=prepared.frame_seconds if prepared else (),
        second_per_grid=prepared.second_per_grid if prepared else 0.0,
        delivery_fallback=outcome.delivery.reason if isinstance(outcome.delivery, NotDelivered) else "",
    )


def model_message(card: ModelCard) -> pb.GetModelResponse:
    geometry = card.geometry
    budgets = [
        pb.Budget(
            tokens=budget.tokens,
            items=budget.max_items,
            segments=budget.max_segments,
            segment_patches=budget.max_segment_patches,
            crops=budget.max_crops,
            attention_backend=card.backends.get(budget, card.attention),
        )
        for budget in card.ladder
    ]
    return pb.GetModelResponse(
        model_id=card.model_id,
        model_type=card.model_type,
        weights_fingerprint=card.fingerprint,
        data_type=_NUMBERS[card.dtype],
        embedding_width=geometry.width,
        deepstack_levels=geometry.levels,
        patch_size=geometry.patch,
        merge_size=geometry.merge,
        temporal_patch_size=geometry.temporal,
        channels=geometry.channels,
        raster_patches=geometry.raster,
        channels_last=geometry.channels_last,
        deliveries=[pb.DELIVERY_WAY_STREAM, *([pb.DELIVERY_WAY_NIXL] if card.nixl else [])],
        encodings=[_ENCODINGS[kind] for kind in card.encodings],
        budgets=budgets,
        limits=pb.Limits(**asdict(card.limits)),
        graphs=card.graphs,
        attention_backend=card.attention,
        device=card.device,
        device_sharing=card.device_sharing,
        clip_groups=card.clip_groups,
        server_version=card.version,
        pooling=_POOLINGS[card.pooling],
        available_poolings=[_POOLINGS[pooling] for pooling in card.poolings],
        dropped_budgets=[pb.DroppedBudget(tokens=n, reason=why) for n, why in sorted(card.dropped.items())],
        prepared=[_MODALITIES[modality] for modality in card.prepared],
        rows_by_grid=[_MODALITIES[modality] for modality in card.rows_by_grid],
        preparation=_preparation(card.preparation),
        decoding=_preparation(card.decoding),
        clip_decoding=_preparation(card.clip_decoding),
        preparation_fingerprint=card.preparation_fingerprint,
        options=card.options,
        tiles=_tiles(card),
        matryoshka=None if card.matryoshka is None else pb.Matryoshka(dimensions=card.matryoshka),
        unavailable=[pb.Unavailable(feature=name, reason=why) for name, why in sorted(card.unavailable.items())],
    )


def _preparation(found: Preparation) -> pb.Preparation:
    return pb.Preparation(place=found.place, reason=found.detail or (found.reason.value if found.reason else ""))


def _tiles(card: ModelCard) -> pb.Tiles | None:
    tiling = next((own.tiling for own in card.preprocessing.values() if own.tiling), None)
    if tiling is None:
        return None
    chosen = tiling.layouts if tiling.rule is TilingRule.BEST_FIT else ()
    return pb.Tiles(
        tile=_size(tiling.tile),
        crop=_size(tiling.crop) if tiling.crop else None,
        patch=tiling.patch,
        single=tiling.max_tiles == 1 and not tiling.layouts and not tiling.patch,
        layouts=[pb.TileLayout(rows=rows, columns=columns) for rows, columns in chosen],
    )


def _size(size: tuple[int, int]) -> pb.PixelSize:
    return pb.PixelSize(height=size[0], width=size[1])
