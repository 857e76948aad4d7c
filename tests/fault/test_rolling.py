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
from proxies import Config, address, envoy, free_ports
from servers import ServerProcess, serving
from vitwire import AsyncClient, Item

pytestmark = pytest.mark.timeout(900)
SERVICE = "vitwire.v1.EncoderService"
WORKERS = 8


def config(replicas: list[int]) -> Config:
    """Health by grpc_health_check; what was refused before an answer began is tried on the other replica."""
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
    }
    previous = "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    elsewhere = {
        "name": "envoy.retry_host_predicates.previous_hosts",
        "typed_config": {"@type": f"type.googleapis.com/{previous}"},
    }
    retries = {
        "retry_on": "unavailable,connect-failure,refused-stream,reset",
        "num_retries": 3,
        "retry_host_predicate": [elsewhere],
        "host_selection_retry_max_attempts": 5,
    }
    route = {
        "match": {"prefix": "/"},
        "route": {"cluster": "replicas", "timeout": "0s", "retry_policy": retries},
    }
    kind = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    manager = {
        "@type": f"type.googleapis.com/{kind}",
        "stat_prefix": "front",
        "codec_type": "HTTP2",
        "http_filters": [router],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    http2 = {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    check = {
        "timeout": "5s",
        "interval": "0.25s",
        "no_traffic_interval": "0.25s",
        "unhealthy_threshold": 3,
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": SERVICE},
    }
    cluster = {
        "name": "replicas",
        "connect_timeout": "1s",
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "health_checks": [check],
        "circuit_breakers": {"thresholds": [{"max_retries": 1024}]},
        "load_assignment": {
            "cluster_name": "replicas",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(port)}} for port in replicas]}],
        },
    }
    listener = {"name": "front", "filter_chains": [{"filters": filters}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


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
    with envoy(config([replica.port for replica in replicas]), tmp_path) as front:
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
    with envoy(config([replica.port for replica in replicas]), tmp_path) as front:
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
    assert set(tally.codes) <= {"OK", "UNAVAILABLE"}
    assert tally.failed <= WORKERS * rounds
    assert after.codes == {"OK": 100}
