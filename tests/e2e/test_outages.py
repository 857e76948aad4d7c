"""What a client sees of servers that freeze, come back, or are still loading."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from both_clients import Call, InThread, both
from checkpoints import Checkpoints
from faults import FAULTY
from processes import frozen
from proxies import free_ports
from servers import PIXELS_ONLY, ServerProcess, serving
from vitwire import AsyncClient, Client, Item, Unavailable

SMALL = Item(np.ones((16, 3 * 2 * 14 * 14), np.float32), (1, 4, 4))
LARGE = Item(np.ones((1024, 3 * 2 * 14 * 14), np.float32), (1, 32, 32))
"""More than fits into one message."""
TIMEOUT = 12.0


@pytest.fixture(scope="module")
def pair(checkpoints: Checkpoints) -> Iterator[list[ServerProcess]]:
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY) as one, serving(checkpoints("qwen2_vl"), *PIXELS_ONLY) as other:
        yield [one, other]


def targets(pair: list[ServerProcess]) -> str:
    return "ipv4:" + ",".join(server.target for server in pair)


async def until_shared(client: Any, item: Item, pair: list[ServerProcess]) -> None:
    """Each method's connections are made in their own time."""
    before, deadline = [each.metric("vitwire_items_total") for each in pair], time.monotonic() + 60
    while any(each.metric("vitwire_items_total") <= then for each, then in zip(pair, before, strict=True)):
        assert time.monotonic() < deadline
        await client.encode([item])


@pytest.mark.parametrize(
    ("make", "item"),
    [(InThread, LARGE), *(pytest.param(make, SMALL, marks=pytest.mark.matrix) for make in (InThread, AsyncClient))],
)
async def test_a_frozen_replica_fails_no_sequential_call(make: Call, item: Item, pair: list[ServerProcess]) -> None:
    async with make(targets(pair), timeout=TIMEOUT) as client:
        await until_shared(client, item, pair)
        with frozen(pair[0]):
            for _ in range(12):
                await client.encode([item])
        await until_shared(client, item, pair)


@pytest.mark.matrix
def test_content_of_a_frozen_replica_is_encoded_by_another(pair: list[ServerProcess]) -> None:
    with Client(targets(pair), timeout=TIMEOUT, affinity=True) as client:
        named = [replace(SMALL, content_id=str(number)) for number in range(12)]
        before = [each.metric("vitwire_items_total") for each in pair]
        client.encode(named)
        assert all(each.metric("vitwire_items_total") > then for each, then in zip(pair, before, strict=True))
        with frozen(pair[0]):
            for item in named[:6]:
                client.encode([item])
        client.encode(named)


def test_a_frozen_server_is_found_without_a_timeout(pair: list[ServerProcess]) -> None:
    with Client(pair[0].target, timeout=float("inf"), max_retries=0) as client:
        client.encode([SMALL])
        begun = time.monotonic()
        with frozen(pair[0]), pytest.raises(Unavailable):
            client.encode([SMALL])
        assert time.monotonic() - begun < 40, "keepalive takes 20 s"


@both
async def test_waiting_for_a_server_that_is_not_there_yet(make: Call, checkpoints: Checkpoints) -> None:
    (port,) = free_ports(1)
    async with make(f"127.0.0.1:{port}", timeout=120, wait_for_ready=True) as client:
        call = asyncio.ensure_future(client.encode([SMALL]))
        await asyncio.sleep(3)
        assert not call.done(), "longer than retries take"
        with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, "--port", str(port)):
            await call


@pytest.mark.parametrize("make", [InThread, pytest.param(AsyncClient, marks=pytest.mark.matrix)])
async def test_a_timeout_says_that_the_server_is_loading(make: Call, checkpoints: Checkpoints, tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    fault.write_text("hang")  # in the forward that warms the engine up
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, wait=False, program=(FAULTY, str(fault))) as server:
        async with make(server.target, timeout=8, wait_for_ready=True) as client:
            with pytest.raises(Unavailable, match="still loading"):
                await client.encode([SMALL])
            fault.write_text("")
            await client.encode([SMALL], timeout=60)
