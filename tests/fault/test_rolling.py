"""Two replicas behind a real Envoy, under load: a rolling restart, and a replica that is killed."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import load
from checkpoints import Checkpoints
from faults import Note, scaled
from load import image, request
from proxies import Config, documented, envoy, free_ports
from servers import ServerProcess, serving
from vitwire import AsyncClient, Item

pytestmark = pytest.mark.timeout(900)
WORKERS = 8


def config(replicas: list["Replica"]) -> Config:
    """The example of deploy/, with checks that fit a lame duck of 2 s."""
    return documented([("127.0.0.1", replica.port) for replica in replicas], interval="0.25s")


class Replica:
    """A server on a port that stays the same over restarts."""

    def __init__(self, model: Path, port: int) -> None:
        self.port = port
        self._model = model
        self._stack = ExitStack()

    def start(self) -> ServerProcess:
        flags = ("--port", str(self.port), "--lame-duck-seconds", "2", "--drain-seconds", "30")
        self.server = self._stack.enter_context(serving(self._model, *flags))
        return self.server

    def stop(self) -> None:
        self._stack.close()


@pytest.fixture
def replicas(checkpoints: Checkpoints) -> Iterator[list[Replica]]:
    made = [Replica(checkpoints("qwen2_vl"), port) for port in free_ports(2)]
    for replica in made:
        replica.start()
    yield made
    for replica in made:
        replica.stop()


async def test_a_rolling_restart_fails_no_request(replicas: list[Replica], tmp_path: Path, note: Note) -> None:
    rounds = scaled(3)
    with envoy(config(replicas), tmp_path) as front:
        await asyncio.wait_for(front.wait_for(2), 30)
        stop, start = asyncio.Event(), time.monotonic()
        loading = asyncio.create_task(load.closed(front.target, request(image(8, 8)), workers=WORKERS, stop=stop))
        codes = []
        for replica in replicas * rounds:
            await asyncio.sleep(1)
            codes.append(await asyncio.to_thread(replica.server.stop))
            await asyncio.to_thread(replica.start)
            await asyncio.wait_for(front.wait_for(2), 60)
            while not replica.server.metric("vitwire_items_total"):  # noqa: ASYNC110 - it takes part again
                await asyncio.sleep(0.05)
        stop.set()
        tally = await loading
    note(restarts=len(codes), seconds=round(time.monotonic() - start), codes=tally.codes, reasons=tally.reasons)
    assert codes == [0] * 2 * rounds
    assert set(tally.codes) == {"OK"}


async def encode_until(stop: asyncio.Event, target: str) -> int:
    """Calls of the Python client, none of which may fail: it sends again what a proxy cut off."""
    calls = 0
    async with AsyncClient(target, timeout=30) as client:
        while not stop.is_set():
            await client.encode([Item(np.ones((64, 3 * 2 * 14 * 14), np.float32), (1, 8, 8))])
            calls += 1
    return calls


async def test_a_killed_replica_takes_down_no_more_than_what_it_held(
    replicas: list[Replica], tmp_path: Path, note: Note
) -> None:
    rounds = scaled(5)
    with envoy(config(replicas), tmp_path) as front:
        await asyncio.wait_for(front.wait_for(2), 30)
        stop = asyncio.Event()
        loading = asyncio.create_task(load.closed(front.target, request(image(8, 8)), workers=WORKERS, stop=stop))
        calling = asyncio.create_task(encode_until(stop, front.target))
        for round_ in range(rounds):
            await asyncio.sleep(1)
            victim = replicas[round_ % 2]
            victim.server.process.kill()
            await asyncio.to_thread(victim.server.process.wait)
            await asyncio.to_thread(victim.start)
            await asyncio.wait_for(front.wait_for(2), 60)
        stop.set()
        tally, own_calls = await loading, await calling
        after = await load.closed(front.target, request(image(8, 8)), workers=WORKERS, calls=100)
    note(kills=rounds, codes=tally.codes, reasons=tally.reasons, calls_of_the_client=own_calls)
    # A stream that breaks off after its headers is INTERNAL: Envoy resets it with INTERNAL_ERROR.
    broken_off = sum(count for reason, count in tally.reasons.items() if "RST_STREAM" in reason)
    assert set(tally.codes) <= {"OK", "UNAVAILABLE", "INTERNAL"}
    assert tally.codes.get("INTERNAL", 0) <= broken_off
    assert tally.failed <= WORKERS * rounds
    assert after.codes == {"OK": 100}
