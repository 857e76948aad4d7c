"""More load than there is capacity, for long, and memory that stays where it was."""

import asyncio
import time
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import load
from faults import Note, bounded_queue, rss_mib, scaled, settle
from load import image, request
from servers import ServerProcess

pytestmark = pytest.mark.timeout(1800)
TIMES = 10
BATCH_SECONDS = 0.1


def slow(fault: Path, seconds: float) -> None:
    """Make each batch take so long."""
    fault.write_text(f"slow {seconds}" if seconds else "")


async def test_ten_times_the_capacity(server: ServerProcess, fault: Path, note: Note) -> None:
    """Each batch of 4 is made to take 0.1 s, so that the load that is needed fits beside the server."""
    slow(fault, BATCH_SECONDS)
    seconds = scaled(60, 5)
    capacity = 4 / BATCH_SECONDS
    ended, checks, peak, before = asyncio.Event(), [], 0.0, rss_mib(server)

    async def watch() -> None:
        nonlocal peak
        async with grpc.aio.insecure_channel(server.target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while not ended.is_set():
                for service in ("", "liveness"):
                    start = time.monotonic()
                    answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
                    checks.append(time.monotonic() - start)
                    assert answer.status == health_pb2.HealthCheckResponse.SERVING
                peak = max(peak, rss_mib(server))
                await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    ran = server.metric("vitwire_items_total")
    start = time.monotonic()
    with bounded_queue(server, 64, 64 << 20):
        tally = await load.offered(server.target, request(image()), rate=TIMES * capacity, seconds=seconds)
    took = time.monotonic() - start
    ended.set()
    await watching
    slow(fault, 0)
    settle(server)
    done = server.metric("vitwire_items_total") - ran
    note(
        seconds=seconds,
        offered_per_second=TIMES * capacity,
        codes=tally.codes,
        served_per_second=round(done / took, 1),
        capacity_per_second=capacity,
        p99_of_served=round(tally.percentile(0.99), 3),
        slowest_health_check=round(max(checks), 3),
        rss_before=before,
        rss_peak=peak,
    )
    assert set(tally.codes) == {"OK", "RESOURCE_EXHAUSTED"}
    assert done == tally.codes["OK"], "every admitted request is answered"
    assert max(checks) < 1
    assert peak < before + 128


async def test_memory_is_flat_over_many_requests(server: ServerProcess, note: Note) -> None:
    calls = scaled(50_000, 1_000)
    message = request(image(4, 4), image(2, 2))
    await load.closed(server.target, message, workers=16, calls=calls // 5)
    settle(server)
    before, start = rss_mib(server), time.monotonic()
    tally = await load.closed(server.target, message, workers=16, calls=calls)
    took = time.monotonic() - start
    settle(server)
    after = rss_mib(server)
    note(calls=calls, codes=tally.codes, per_second=round(calls / took), rss_before=before, rss_after=after)
    assert tally.codes == {"OK": calls}
    assert after - before < 16
