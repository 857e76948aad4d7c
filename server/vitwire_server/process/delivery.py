"""The courier of a server process."""

import logging

from vitwire.agents import MISSING, AgentError, Memory, is_installed
from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.delivery.courier import Courier
from vitwire_server.delivery.transfers import Bounds
from vitwire_server.observe.metrics import Metrics
from vitwire_server.runtime.outbox import Outbox
from vitwire_server.sessions.arena import ArenaMemory

_log = logging.getLogger(__name__)


def check(settings: ServeSettings) -> None:
    """Raises UsageError if NIXL is wanted and not installed."""
    if settings.nixl and not is_installed():
        raise UsageError(f"--nixl: {MISSING}")


def courier(settings: ServeSettings, metrics: Metrics, memory: ArenaMemory | None) -> Courier | None:
    """Delivers rows from the processes' shared memory without a copy; None without --nixl. Raises UsageError."""
    if not settings.nixl:
        return None
    # Registration may pin memory, so only the part of the arena that is in memory anyway is registered.
    sources = [Memory(memory.arena.address, memory.kept)] if memory else []
    try:
        return Courier(metrics.delivery, sources, Bounds(seconds=settings.nixl_seconds))
    except AgentError as error:
        raise UsageError(f"--nixl: {error}") from error


def add_device(courier: Courier, outbox: Outbox) -> None:
    """Deliver rows from the device to devices as well."""
    try:
        courier.add_device(outbox.memory, outbox.make_current, outbox.uploaded)
    except AgentError as error:
        _log.warning("embeddings are not delivered to clients' devices: %s", error)
