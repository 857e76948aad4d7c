"""What the fault tier shares: its scale, and the accounts that have to be even after every fault."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

import faulty
from servers import ServerProcess

SCALE = float(os.environ.get("VITWIRE_FAULT_SCALE", "1"))
FAULTY = str(Path(faulty.__file__))
Note = Callable[..., None]


def scaled(full: int, least: int = 1) -> int:
    """So much of the full size."""
    return max(least, round(full * SCALE))


def rss_mib(server: ServerProcess) -> float:
    """Resident memory of a server."""
    return float(psutil.Process(server.process.pid).memory_info().rss) / (1 << 20)


def settle(server: ServerProcess, seconds: float = 30) -> None:
    """Wait until every account is even: nothing is in flight, and nothing was lost.

    Requests of clients that left long ago may still come up one after the other, with moments of nothing in between.
    """
    deadline = time.monotonic() + seconds
    while (odd := _uneven(server)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not odd, f"{odd} after {seconds:g} s: {server.log()[-2000:]}"


def _uneven(server: ServerProcess) -> dict[str, float]:
    """Accounts that are not 0."""
    names = ("inflight_requests", "admitted_items", "admitted_bytes", "queue_items")
    accounts = {name: server.metric(f"vitwire_{name}") for name in names}
    opened, closed = (server.metric(f"vitwire_tickets_{each}_total") for each in ("opened", "closed"))
    answered = ("vitwire_graph_hits_total", "vitwire_eager_fallbacks_total", "vitwire_cache_hits_total")
    paths = sum(map(server.metric, answered))
    accounts |= {"tickets": opened - closed, "items": server.metric("vitwire_items_total") - paths}
    return {name: value for name, value in accounts.items() if value}
