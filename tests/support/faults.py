"""Shared by tests/fault: the scale, and checks that counters balance after every fault."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import faulty_server
from processes import memory_mib
from servers import ServerProcess

SCALE = float(os.environ.get("VITWIRE_FAULT_SCALE", "1"))
FAULTY = str(Path(faulty_server.__file__))
Note = Callable[..., None]


def scaled(full: int, least: int = 1) -> int:
    """The full size times the scale."""
    return max(least, round(full * SCALE))


def rss_mib(server: ServerProcess) -> float:
    """Resident memory of a server and its edges."""
    return memory_mib(server)


ON_THE_DEVICE = 64
"""Items that the device may hold at once unless flags say less: a batch is packed from a window of 64."""


def settle(server: ServerProcess, seconds: float = 30, on_the_device: int = ON_THE_DEVICE, lost: int = 0) -> None:
    """Wait until every account is even: nothing is in flight, nothing was lost, nothing was computed in vain.

    `lost` requests were those of edges that were killed, which count no end of theirs.
    Requests of clients that left long ago may still come up one after the other, with moments of nothing in between.
    """
    deadline = time.monotonic() + seconds
    while (odd := _uneven(server, on_the_device, lost)) and time.monotonic() < deadline:
        time.sleep(0.05)
    vain = f"{_undelivered(server):g} forwards in vain, {_given_up(server):g} requests given up"
    assert not odd, f"{odd} ({vain}) after {seconds:g} s: {server.log()[-2000:]}"


def _uneven(server: ServerProcess, on_the_device: int, lost: int) -> dict[str, float]:
    """Accounts that are not 0."""
    names = ("inflight_requests", "admitted_items", "admitted_bytes", "queue_items", "queue_bytes")
    accounts = {name: server.metric(f"vitwire_{name}") for name in names}
    opened, closed = (server.metric(f"vitwire_tickets_{each}_total") for each in ("opened", "closed"))
    answered = ("vitwire_graph_hits_total", "vitwire_eager_fallbacks_total", "vitwire_cache_hits_total")
    paths = sum(map(server.metric, answered))
    accounts |= {"tickets": opened - closed, "items": server.metric("vitwire_items_total") - paths}
    given_up = _given_up(server) + lost
    accounts["undelivered forwards"] = max(0.0, _undelivered(server) - given_up * on_the_device)
    return {name: value for name, value in accounts.items() if value}


def _undelivered(server: ServerProcess) -> float:
    """Items that were encoded for a request that was over by then."""
    return server.metric("vitwire_cancelled_total", stage="encoded")


def _given_up(server: ServerProcess) -> float:
    """Requests that ended early: each may leave behind what the device held at that moment, and no more."""
    return server.metric("vitwire_requests_total") - server.metric("vitwire_requests_total", code="OK")


@contextmanager
def bounded_queue(server: ServerProcess, most_items: int, most_bytes: int) -> Iterator[None]:
    """Fails if the queue is seen beyond the bounds of admission, which every item in it went through."""
    peaks, ended = [0.0, 0.0], Event()

    def watch() -> None:
        while not ended.wait(0.05):
            for index, name in enumerate(("vitwire_queue_items", "vitwire_queue_bytes")):
                peaks[index] = max(peaks[index], server.metric(name))

    watching = Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()
    assert peaks[0] <= most_items, f"{peaks[0]:g} items waited, {most_items} were admitted at most"
    assert peaks[1] <= most_bytes, f"{peaks[1]:g} bytes waited, {most_bytes} were admitted at most"
