"""The courier of a server process."""

import logging

import torch

from vitwire.shared.agents import MISSING, AgentError, is_installed
from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.delivery.courier import Courier
from vitwire_server.delivery.cuda import CudaError
from vitwire_server.delivery.transfers import Bounds
from vitwire_server.observe.metrics import Metrics
from vitwire_server.runtime.memory.outbox import Outbox

_log = logging.getLogger(__name__)
_PASSING_BYTES = 512 << 20
"""Room for rows on their way to clients, for new ones, and for those that move to the host."""


def check(settings: ServeSettings) -> None:
    """Raises UsageError if NIXL is wanted and not installed."""
    if settings.nixl and not is_installed():
        raise UsageError(f"--nixl: {MISSING}")


def courier(settings: ServeSettings, metrics: Metrics) -> Courier | None:
    """None without --nixl. Raises UsageError."""
    if not settings.nixl:
        return None
    try:
        return Courier(metrics.delivery, Bounds(seconds=settings.nixl_seconds))
    except AgentError as error:
        raise UsageError(f"--nixl: {error}") from error


def add_outbox(courier: Courier, outbox: Outbox, *, keep: bool) -> None:
    """Deliver rows from the outbox as well, and from now on `keep` those there that are only stored."""
    if outbox.is_shared:
        try:
            courier.add_device(outbox.memory, outbox.exported(), outbox.uploaded)
        except (AgentError, CudaError) as error:
            _log.warning("embeddings are not delivered to clients' devices: %s", error)
            return
    outbox.keeps = keep


def outbox(settings: ServeSettings, device: torch.device) -> Outbox | None:
    """Memory that rows are delivered from; None if there is nothing to deliver from there. Raises UsageError."""
    if not settings.nixl or (device.type == "cpu" and not settings.stored_bytes):
        return None
    nbytes = _PASSING_BYTES + settings.stored_bytes
    try:
        return Outbox(device, nbytes)
    except RuntimeError as error:  # of the CPU's allocator; that of CUDA is one of them
        text = f"{nbytes} bytes of {device} for NIXL cannot be allocated: {str(error).partition(chr(10))[0]}"
        raise UsageError(f"--store-bytes: {text}") from None
