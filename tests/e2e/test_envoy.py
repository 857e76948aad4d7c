"""The example of deploy/examples/envoy, run by a real Envoy in front of two servers."""

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from urllib.request import urlopen

import grpc
import pytest

import load
from checkpoints import Checkpoints
from http2 import GOAWAY, RST_STREAM, flood, long_headers
from proxies import ENVOY, EXAMPLE, Envoy, documented, envoy
from servers import PIXELS_ONLY, ServerProcess, serving
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub

CALLS = 40
Replicas = tuple[ServerProcess, ServerProcess]


@pytest.fixture(scope="module")
def replicas(checkpoints: Checkpoints) -> Iterator[Replicas]:
    model = checkpoints("qwen2_vl")
    with serving(model, *PIXELS_ONLY) as first, serving(model, *PIXELS_ONLY) as second:
        yield first, second


@pytest.fixture
def front(replicas: Replicas, tmp_path: Path) -> Iterator[Envoy]:
    config = documented([("127.0.0.1", replica.port) for replica in replicas], interval="0.25s")
    for cluster in config["static_resources"]["clusters"]:
        for check in cluster["health_checks"]:
            check["timeout"] = "1s"
    with envoy(config, tmp_path) as front:
        asyncio.run(asyncio.wait_for(front.wait_for(2), 60))
        yield front


def items(replicas: Replicas) -> list[float]:
    return [replica.metric("vitwire_items_total") for replica in replicas]


def counters(front: Envoy, name: str) -> dict[str, int]:
    """A counter of each cluster, or of the connection manager."""
    with urlopen(f"http://127.0.0.1:{front.admin}/stats?format=json&filter={name}", timeout=10) as answer:
        stats = json.load(answer)["stats"]
    return {each["name"].split(".")[1]: each["value"] for each in stats if each["name"].endswith(f".{name}")}


def upstream_requests(front: Envoy) -> dict[str, int]:
    """Requests that each cluster received."""
    return counters(front, "upstream_rq_total")


def test_the_example_is_valid_as_it_is() -> None:
    command = [str(ENVOY), "--mode", "validate", "-c", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower()


async def test_requests_without_a_hint_are_balanced(replicas: Replicas, front: Envoy) -> None:
    before = items(replicas)
    tally = await load.closed(front.target, load.request(load.image()), workers=4, calls=CALLS)
    assert tally.codes == {"OK": CALLS}
    shares = [after - then for after, then in zip(items(replicas), before, strict=True)]
    assert sum(shares) == CALLS
    assert min(shares) >= CALLS / 8, shares
    assert upstream_requests(front) == {"vitwire": CALLS, "vitwire-by-content": 0}


async def test_requests_with_a_hint_go_to_one_replica(replicas: Replicas, front: Envoy) -> None:
    """Each alone, so that no replica exceeds its bound on the load."""
    before = items(replicas)
    async with grpc.aio.insecure_channel(front.target) as channel:
        for _ in range(CALLS // 4):
            hint = (("x-vitwire-content-id", "ca978112ca1bbdcafac231b39a23dc4d"),)
            async for _ in EncoderServiceStub(channel).Encode(load.request(load.image()), metadata=hint, timeout=60):
                pass
    shares = [after - then for after, then in zip(items(replicas), before, strict=True)]
    assert sorted(shares) == [0, CALLS / 4]
    assert upstream_requests(front) == {"vitwire": 0, "vitwire-by-content": CALLS / 4}


async def test_a_frozen_replica_is_ejected_and_returns(replicas: Replicas, front: Envoy) -> None:
    """It accepts connections and answers nothing, which only health checks notice."""
    frozen, other = replicas
    frozen.process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.wait_for(front.wait_for(1), 60)
        before = other.metric("vitwire_items_total")
        tally = await load.closed(front.target, load.request(load.image()), workers=2, calls=CALLS // 2)
        assert tally.codes == {"OK": CALLS // 2}
        assert other.metric("vitwire_items_total") - before == CALLS // 2
    finally:
        frozen.process.send_signal(signal.SIGCONT)
    await asyncio.wait_for(front.wait_for(2), 60)
    await asyncio.wait_for(taking_part(frozen, front), 60)


async def taking_part(replica: ServerProcess, front: Envoy) -> None:
    """Returns when a replica got requests again; none of those that are sent for it may fail."""
    before = replica.metric("vitwire_items_total")
    while replica.metric("vitwire_items_total") == before:
        tally = await load.closed(front.target, load.request(load.image()), workers=4, calls=CALLS // 4)
        assert tally.codes == {"OK": CALLS // 4}


def calls_beside(attack: Thread, front: Envoy) -> None:
    """Calls of another connection while an attack runs, all of which must be answered."""
    answered = 0
    with grpc.insecure_channel(front.target, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        attack.start()
        while attack.is_alive() or answered < 3:
            list(EncoderServiceStub(channel).Encode(load.request(load.image()), timeout=60))
            answered += 1


def test_a_connection_that_resets_its_calls_is_closed(front: Envoy) -> None:
    calls_beside(Thread(target=flood, args=(front.target, 5_000)), front)
    assert counters(front, "downstream_rq_too_many_premature_resets")["vitwire"] == 1
    assert upstream_requests(front)["vitwire"] < 5_000


def test_a_long_block_of_headers_is_refused_before_it_is_read(front: Envoy) -> None:
    before = upstream_requests(front)["vitwire"]
    kinds = {kind for kind, *_ in long_headers(front.target, 2_000_000)}
    assert kinds & {GOAWAY, RST_STREAM}
    assert upstream_requests(front)["vitwire"] == before
