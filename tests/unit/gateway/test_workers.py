"""Callers of the router, and the processes that read their requests."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator
from functools import partial

import pytest

from vitwire.shared.fairness.hosts import host_name
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.callers import Caller
from vitwire_gateway.requests.image_sources import Limits
from vitwire_gateway.requests.request_reading import CutRequest, cut_request, read
from vitwire_gateway.workers import Workers

LIMITS = Limits(4, 1 << 20)
JOB = partial(cut_request, with_clips=False)
ARGUMENTS = (LIMITS,)
NOTHING = [[], [[], [], []]]


def test_hosts_are_callers() -> None:
    assert host_name("10.0.0.1") == host_name("::ffff:10.0.0.1") == "10.0.0.1"
    assert host_name("2001:db8:1:2::1") == host_name("2001:db8:1:2:ffff::9%eth0") != host_name("2001:db8:1:3::1")
    assert host_name("unix") == "unix"


@pytest.fixture
async def workers() -> AsyncGenerator[Workers, None]:
    found = Workers("vitwire_gateway.router.routing", 256 << 20)
    yield found
    await found.close()


async def test_a_worker_that_ends_is_replaced(workers: Workers) -> None:
    caller = Caller.of("a")
    body = b'{"messages":[]}'
    assert await workers.run(caller, JOB, body, 1000, *ARGUMENTS) == NOTHING
    (worker,) = workers._pool._idle
    os.kill(worker.process.pid, signal.SIGSTOP)
    job = asyncio.create_task(workers.run(caller, JOB, body, 1000, *ARGUMENTS))
    await asyncio.sleep(0.01)
    os.kill(worker.process.pid, signal.SIGKILL)
    with pytest.raises(ApiError) as caught:
        await job
    assert (caught.value.status, caught.value.code) == (503, "router_failed")
    assert await workers.run(caller, JOB, body, 1000, *ARGUMENTS) == NOTHING


async def test_answers_carry_bytes_and_errors_within_a_limit(workers: Workers) -> None:
    caller = Caller.of("a")
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}} for text in ("QUJD", "%%%%")]
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    pieces, (places, sources, _) = await workers.run(caller, JOB, body, 10_000, *ARGUMENTS)
    assert [bytes(each) for each in pieces[1:]] == [b"},{", b"}]}]}"]
    assert places == [[f"messages[0].content[{number}].image_url", number] for number in range(2)]
    assert sources[0] == ["data", b"ABC", "image"]
    refused = sources[1][1]
    assert isinstance(refused, ApiError)
    assert (refused.status, refused.code, refused.param) == (400, "invalid_base64", places[1][0])
    with pytest.raises(ApiError) as caught:
        await workers.run(caller, JOB, body, 20, *ARGUMENTS)
    assert (caught.value.status, caught.value.code) == (503, "router_failed")
    assert await workers.run(caller, JOB, b"{}", 20, *ARGUMENTS) == NOTHING


async def test_small_bodies_of_many_values_are_read_in_a_worker(workers: Workers) -> None:
    """Reading 32,000 of them here would hold up others for 25 ms."""
    for few, is_here in ((b"1," * 1000 + b"1", True), (b"1," * 30_000 + b"1", False)):
        found = await read(workers, Caller.of("a"), JOB, b'{"input":[' + few + b"]}", LIMITS)
        assert isinstance(found, tuple) is is_here


async def test_long_urls_leave_the_worker_alive(workers: Workers) -> None:
    """Characters that JSON escapes make its answer longer than the request."""
    parts = [{"image_url": {"url": "https://" + "\U0001f600" * 8000 + str(number)}} for number in range(60)]
    request = {"messages": [{"role": "user", "content": parts}], "mm_processor_kwargs": {"max_pixels": 1 << 62}}
    body, job = json.dumps(request, ensure_ascii=False).encode(), JOB
    found = CutRequest.of(await read(workers, Caller.of("a"), job, body, LIMITS._replace(max_images=64)))
    assert dict(found.images.options) == {"max_pixels": 1 << 62}
    assert {str(each.content)[-55:] for each in found.images.sources} >= {
        "image_url: the URL exceeds the limit of 8192 characters"
    }
    assert workers._pool._idle[0].is_alive


async def test_work_is_bounded(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitwire_gateway.workers._WORK_SECONDS", 0.05)
    caller = Caller.of("a")
    body = b'{"messages":[' + b",".join([b"{}"] * 450_000) + b"]}"
    for _ in range(2):
        with pytest.raises(ApiError, match="s of processor time") as caught:
            await workers.run(caller, JOB, body, 1000, *ARGUMENTS)
        assert (caught.value.status, caught.value.code) == (400, "too_costly")
    assert not workers._places._paces
