"""What a server process decodes with, and what it offers."""

import logging
import sys
from dataclasses import replace
from importlib.util import find_spec

from vitwire_server.config.host import decode_processes
from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Encoding, ModelCard, Resizing
from vitwire_server.decoding.pool import DecodePool, Sizes
from vitwire_server.observe.metrics.rpc import RpcMetrics
from vitwire_server.rpc.decodes import Decoding
from vitwire_server.rpc.responses import model_message
from vitwire_server.scheduling.admission import Admission

_log = logging.getLogger(__name__)
_IMAGES = (Encoding.JPEG, Encoding.PNG, Encoding.WEBP)
_CLIPS = (Encoding.MP4, Encoding.WEBM)
_BYTES_PER_PIXEL = 32
"""What Pillow needs for the largest images: coefficients of progressive JPEGs, and copies in other modes."""
_BASE_BYTES = 512 << 20
_COPIES = 3
"""Of a file and of the prepared pixels in a decoder."""


def check(settings: ServeSettings) -> None:
    """Raises UsageError if decoding is wanted and Pillow is not installed."""
    if settings.decode_process_count and not find_spec("PIL"):
        raise UsageError(f"--decode-processes {settings.decode_processes}: Pillow is not installed")


def described(card: ModelCard, settings: ServeSettings) -> ModelCard:
    """The card with what is decoded, by the settings, the model and the installed libraries."""
    if not _processes(settings):
        return card
    settable = {kind: own for kind, own in card.preprocessing.items() if own.resizing is not Resizing.OTHER}
    encodings: tuple[Encoding, ...] = _IMAGES if Modality.IMAGE in settable else ()
    clips = settable.get(Modality.VIDEO)
    if clips and clips.sampling and find_spec("av"):
        encodings += _CLIPS
    if not encodings:
        return card
    limits = replace(card.limits, encoded_bytes=settings.max_encoded_bytes, encoded_pixels=settings.max_image_pixels)
    return replace(card, limits=limits, encodings=encodings)


def decoding(settings: ServeSettings, card: ModelCard, metrics: RpcMetrics, processes: int) -> Decoding | None:
    """For one of `processes` that serve RPCs; None if the card offers nothing. Decoders start when they are needed."""
    if not card.encodings:
        return None
    geometry = card.geometry
    output = card.limits.patches_per_item * geometry.columns(frames=geometry.temporal)
    sizes = Sizes(
        processes=max(1, _processes(settings) // processes),
        file_bytes=settings.max_encoded_bytes,
        output_bytes=output,
        pixels=settings.max_image_pixels,
        seconds=settings.decode_seconds,
        memory=_BASE_BYTES
        + settings.max_image_pixels * _BYTES_PER_PIXEL
        + _COPIES * (settings.max_encoded_bytes + output),
    )
    model = model_message(card).SerializeToString()
    pool = DecodePool(sizes, model, metrics, clips=Encoding.MP4 in card.encodings)
    waiting = Admission(settings.max_queued_items, settings.max_queued_bytes // processes)
    return Decoding(pool, waiting, metrics)


def _processes(settings: ServeSettings) -> int:
    """Decoders per device."""
    if settings.decode_process_count is None and not find_spec("PIL"):
        return 0
    wanted = settings.decode_process_count
    return decode_processes(wanted, devices=len(settings.device_list)) if sys.platform == "linux" else 0
