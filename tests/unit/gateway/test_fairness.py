"""What requests of the router share: budgets, turns, and the processes that read for them."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, suppress
from functools import partial

import pytest

from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.fairness import Budget, Caller, Full, Holding, Turns, host_name
from vitwire_gateway.openai import chat
from vitwire_gateway.requests.image_sources import Limits
from vitwire_gateway.requests.request_reading import CutRequest, RequestForm, cut_request, read
from vitwire_gateway.workers import Workers

LIMITS, FORM = Limits(4, 1 << 20), RequestForm(chat.images_of)
ARGUMENTS = None, LIMITS, FORM, "part"
JOB = partial(cut_request, api=FORM, hole="part")
NOTHING = [[], [[], [], ""]]


def test_hosts_are_callers() -> None:
    assert host_name("10.0.0.1") == host_name("::ffff:10.0.0.1") == "10.0.0.1"
    assert host_name("2001:db8:1:2::1") == host_name("2001:db8:1:2:ffff::9%eth0") != host_name("2001:db8:1:3::1")
    assert host_name("unix") == "unix"


async def test_one_caller_leaves_a_quarter_to_others() -> None:
    budget = Budget(8)
    async with AsyncExitStack() as stack:
        for _ in range(6):
            (await stack.enter_async_context(budget.holding("a"))).take(1)
        with pytest.raises(Full):
            (await stack.enter_async_context(budget.holding("a"))).take(1)
        for _ in range(2):
            (await stack.enter_async_context(budget.holding("b"))).take(1)
        with pytest.raises(Full):
            (await stack.enter_async_context(budget.holding("c"))).take(1)
        with pytest.raises(Full):
            budget.check("c")
    assert budget.used == 0
    async with budget.holding("a") as alone:
        alone.take(8)


async def stalled(budget: Budget, name: str, amount: int, outcome: list[Holding]) -> None:
    async with budget.holding(name) as holding:
        outcome.append(holding)
        with suppress(TimeoutError):
            async with holding.losable(600, grace=0):
                holding.take(amount)
                await asyncio.Event().wait()


async def test_what_is_due_goes_to_others() -> None:
    """First of the caller that holds the most."""
    budget, holdings = Budget(12), list[Holding]()
    tasks = [asyncio.create_task(stalled(budget, name, 3, holdings)) for name in ("a", "b", "b")]
    await asyncio.sleep(0.01)
    async with budget.holding("c") as taking:
        taking.take(6)
        assert [each.is_lost for each in holdings] == [False, True, False]
        with pytest.raises(Full):
            holdings[1].take(1)
        budget.drain()
        await asyncio.gather(*tasks)
        assert budget.used == 6


async def test_a_body_that_arrives_keeps_its_place() -> None:
    budget = Budget(10)
    async with budget.holding("a") as body, budget.holding("b") as other, body.losable(600, grace=0):
        body.take(7)
        body.advance(1 << 20)
        with pytest.raises(Full):
            other.take(7)
        assert not body.is_lost


async def test_the_next_turn_is_of_whoever_worked_least() -> None:
    turns, order = Turns(2), list[str]()
    attacker, honest = Caller.of("attacker"), Caller.of("honest")
    running = await turns.begin(attacker)

    async def work(caller: Caller) -> None:
        async with turns.turn(caller):
            order.append(caller.name)
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(work(attacker)) for _ in range(5)]
    await asyncio.sleep(0.02)
    assert order == [], "one turn is left to others"
    tasks.append(asyncio.create_task(work(honest)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["honest"]
    tasks[0].cancel()
    running.end()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["honest"] + ["attacker"] * 4
    assert not turns._requests
    assert not turns._callers
    assert turns._free == 2


async def test_a_new_request_of_the_same_caller_does_not_wait_for_the_old_ones() -> None:
    turns, order = Turns(1), list[int]()
    large, small = Caller.of("a"), Caller.of("a")

    async def work(caller: Caller) -> None:
        async with turns.turn(caller):
            order.append(caller.request)
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(work(large)) for _ in range(6)]
    await asyncio.sleep(0.025)
    tasks.append(asyncio.create_task(work(small)))
    await asyncio.gather(*tasks)
    assert order.index(small.request) < 6


async def test_turns_of_one_caller_go_to_all_of_its_requests() -> None:
    """Also before the first turn has ended, and so counted as work."""
    turns = Turns(5)
    other = [await turns.begin(Caller.of("a")) for _ in range(3)]
    requests = [Caller.of("b") for _ in range(3)]
    waiting = [asyncio.create_task(turns.begin(each)) for each in requests for _ in range(5)]
    await asyncio.sleep(0)
    for turn in other:
        turn.end()
    await asyncio.sleep(0)
    granted = [task.result() for task in waiting if task.done()]
    assert {each.caller for each in granted[1:]} == set(requests)
    for turn in granted:
        turn.end()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.fixture
async def workers() -> AsyncGenerator[Workers, None]:
    found = Workers("vitwire_gateway.router.routing", 256 << 20)
    yield found
    await found.close()


async def test_a_worker_that_ends_is_replaced(workers: Workers) -> None:
    caller = Caller.of("a")
    body = b'{"messages":[]}'
    assert await workers.run(caller, cut_request, body, 1000, *ARGUMENTS) == NOTHING
    (worker,) = workers._pool._idle
    os.kill(worker.process.pid, signal.SIGSTOP)
    job = asyncio.create_task(workers.run(caller, cut_request, body, 1000, *ARGUMENTS))
    await asyncio.sleep(0.01)
    os.kill(worker.process.pid, signal.SIGKILL)
    with pytest.raises(ApiError) as caught:
        await job
    assert (caught.value.status, caught.value.code) == (503, "router_failed")
    assert await workers.run(caller, cut_request, body, 1000, *ARGUMENTS) == NOTHING


async def test_answers_carry_bytes_and_errors_within_a_limit(workers: Workers) -> None:
    caller = Caller.of("a")
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}} for text in ("QUJD", "%%%%")]
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    pieces, (places, sources, _) = await workers.run(caller, cut_request, body, 10_000, *ARGUMENTS)
    assert [bytes(each) for each in pieces[1:]] == [b"},{", b"}]}]}"]
    assert places == [[f"messages[0].content[{number}].image_url", number] for number in range(2)]
    assert sources[0] == ["data", b"ABC", "image"]
    refused = sources[1][1]
    assert isinstance(refused, ApiError)
    assert (refused.status, refused.code, refused.param) == (400, "invalid_base64", places[1][0])
    with pytest.raises(ApiError) as caught:
        await workers.run(caller, cut_request, body, 20, *ARGUMENTS)
    assert (caught.value.status, caught.value.code) == (503, "router_failed")
    assert await workers.run(caller, cut_request, b"{}", 20, *ARGUMENTS) == NOTHING


async def test_small_bodies_of_many_values_are_read_in_a_worker(workers: Workers) -> None:
    """Reading 32,000 of them here would hold up others for 25 ms."""
    for few, is_here in ((b"1," * 1000 + b"1", True), (b"1," * 30_000 + b"1", False)):
        found = await read(workers, Caller.of("a"), JOB, b'{"input":[' + few + b"]}", "", LIMITS)
        assert isinstance(found, tuple) is is_here


async def test_long_urls_leave_the_worker_alive(workers: Workers) -> None:
    """Characters that JSON escapes make its answer longer than the request."""
    parts = [{"image_url": {"url": "\U0001f600" * 8000 + str(number)}} for number in range(60)]
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}, ensure_ascii=False).encode()
    found = CutRequest.of(await read(workers, Caller.of("a"), JOB, body, "", LIMITS._replace(max_images=64)))
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
            await workers.run(caller, cut_request, body, 1000, *ARGUMENTS)
        assert (caught.value.status, caught.value.code) == (400, "too_costly")
    assert not workers._turns._callers
