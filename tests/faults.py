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


def settle(server: ServerProcess, seconds: float = 120) -> None:
    """Wait until no request is in flight, and check that nothing was lost: every account is even.

    Requests of clients that left long ago may still be worked off, on a machine that has other things to do too.
    """
    deadline = time.monotonic() + seconds
    while (active := server.metric("vitwire_inflight_requests")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert active == 0, f"{active:g} requests are in flight {seconds:g} s later: {server.log()[-2000:]}"
    assert server.metric("vitwire_tickets_opened_total") == server.metric("vitwire_tickets_closed_total")
    assert server.metric("vitwire_admitted_items") == 0
    assert server.metric("vitwire_admitted_bytes") == 0
    assert server.metric("vitwire_queue_items") == 0
    answered = ("vitwire_graph_hits_total", "vitwire_eager_fallbacks_total", "vitwire_cache_hits_total")
    assert server.metric("vitwire_items_total") == sum(map(server.metric, answered))
