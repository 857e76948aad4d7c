"""Outcomes to messages: chunks of rows, reports and per-item errors."""

from collections.abc import Iterator
from typing import TypeVar

from vitwire import wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.errors import EncoderError
from vitwire_server.core.models import ModelCard
from vitwire_server.core.reports import Encoded, ItemReport, Outcome, Path
from vitwire_server.rpc.codec import DTYPES
from vitwire_server.rpc.status import duration, status_of

Answer = TypeVar("Answer", pb.EncodeResponse, pb.EncodeStreamResponse)

CHUNK_BYTES = 1 << 20
_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
_PATHS = {Path.GRAPH: pb.PATH_GRAPH, Path.EAGER: pb.PATH_EAGER, Path.CACHE: pb.PATH_CACHE}


def frames(kind: type[Answer], item: int, outcome: Outcome) -> Iterator[wire.Frame[Answer]]:
    """The messages that answer one item: its rows in chunks of about 1 MiB, or its error."""
    if isinstance(outcome, EncoderError):
        yield wire.Frame(kind(item=item, error=status_of(outcome)))
        return
    embedding = outcome.embedding
    rows, width = embedding.shape
    row_bytes = width * embedding.dtype.size
    step = max(1, CHUNK_BYTES // row_bytes)
    for row in range(0, rows, step):
        last = row + step >= rows
        chunk = pb.EmbeddingChunk(data_type=_NUMBERS[embedding.dtype], shape=embedding.shape, row=row, last=last)
        report = _report(outcome) if last else None
        data = embedding.data[row * row_bytes : (row + step) * row_bytes]
        yield wire.Frame(kind(item=item, chunk=chunk, report=report), data)


def _report(outcome: Encoded) -> pb.ItemReport:
    report: ItemReport = outcome.report
    return pb.ItemReport(
        path=_PATHS[report.path],
        fallback_reason=report.fallback or "",
        budget_tokens=report.budget_tokens,
        tokens=report.tokens,
        queued=duration(report.queued),
        encoded=duration(report.encoded),
        kept=outcome.embedding.kept,
    )


def model_message(card: ModelCard) -> pb.GetModelResponse:
    """The card as the answer to GetModel."""
    geometry, limits = card.geometry, card.limits
    image, video = (
        pb.Preprocessor(
            min_pixels=settings.min_pixels,
            max_pixels=settings.max_pixels,
            mean=settings.mean,
            std=settings.std,
            rescale_factor=settings.rescale_factor,
            resample=settings.resample,
            bounds_span_frames=settings.bounds_span_frames,
        )
        for _, settings in sorted(card.preprocessing.items())
    )
    budgets = [
        pb.Budget(
            tokens=budget.tokens,
            items=budget.max_items,
            segments=budget.max_segments,
            segment_patches=budget.max_segment_patches,
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
        image_preprocessor=image,
        video_preprocessor=video,
        budgets=budgets,
        limits=pb.Limits(
            request_bytes=limits.request_bytes,
            items_per_request=limits.items_per_request,
            patches_per_item=limits.patches_per_item,
            queued_items=limits.queued_items,
            queued_bytes=limits.queued_bytes,
        ),
        graphs=card.graphs,
        attention_backend=card.attention,
        device=card.device,
        server_version=card.version,
        dropped_budgets=[pb.DroppedBudget(tokens=n, reason=why) for n, why in sorted(card.dropped.items())],
    )
