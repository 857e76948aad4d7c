"""Writes that a client does not read end after a bound; all others are left alone."""

import asyncio
from collections.abc import Awaitable

import pytest

from vitwire_server.rpc.pending_writes import PendingWrites


async def never() -> None:
    await asyncio.Event().wait()


async def outcome(writes: PendingWrites, write: Awaitable[None]) -> str:
    try:
        await writes.complete(write)
    except TimeoutError:
        return "stalled"
    return "written"


async def test_a_write_that_stalls_is_ended() -> None:
    writes = PendingWrites(0.05)
    assert await outcome(writes, never()) == "stalled"
    assert await outcome(writes, asyncio.sleep(0)) == "written", "the task itself was not cancelled"


async def test_each_write_has_its_own_time() -> None:
    """Writes of one RPC that together take longer than one may, beside writes that stall."""
    writes = PendingWrites(1.0)

    async def steady() -> list[str]:
        return [await outcome(writes, asyncio.sleep(0.04)) for _ in range(30)]

    stalled = [asyncio.create_task(outcome(writes, never())) for _ in range(3)]
    assert await steady() == ["written"] * 30
    later = asyncio.create_task(outcome(writes, never()))
    assert await asyncio.gather(*stalled, later) == ["stalled"] * 4


async def test_a_cancelled_rpc_stays_cancelled() -> None:
    writes = PendingWrites(0.05)
    task = asyncio.create_task(outcome(writes, never()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.1)
    assert await outcome(writes, never()) == "stalled", "the timer serves later writes too"


async def test_a_failed_write_raises_its_own_error() -> None:
    writes = PendingWrites(60)

    async def broken() -> None:
        raise EOFError

    with pytest.raises(EOFError):
        await writes.complete(broken())
    assert await outcome(writes, asyncio.sleep(0)) == "written"
