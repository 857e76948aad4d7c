"""The courier of a server process."""

import logging

from vitwire.agents import MISSING, AgentError, is_installed
from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.delivery.courier import Courier
from vitwire_server.delivery.cuda import CudaError
from vitwire_server.delivery.transfers import Bounds
from vitwire_server.observe.metrics import Metrics
from vitwire_server.runtime.outbox import Outbox

_log = logging.getLogger(__name__)


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


def add_device(courier: Courier, outbox: Outbox) -> None:
    """Deliver rows from the device to devices as well."""
    try:
        courier.add_device(outbox.memory, outbox.exported(), outbox.uploaded)
    except (AgentError, CudaError) as error:
        _log.warning("embeddings are not delivered to clients' devices: %s", error)
