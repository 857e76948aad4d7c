"""Sessions whose items are cached or in flight for others."""

import asyncio
import random
from collections import Counter
from contextlib import suppress

import pytest

from session_rig import BAD, BROKEN, Rig, item, until
from vitwire_server.core.errors import (
    NotCached,
    Overloaded,
)
from vitwire_server.core.items import CacheLookup, DType
from vitwire_server.core.reports import Encoded, Path


async def test_equal_items_are_encoded_once_and_found_by_name(caching: Rig) -> None:
    caching.open.clear()
    rpcs = [caching.session() for _ in range(3)]
    for rpc in rpcs:
        await rpc.submit({1: item(8, content_id="eight")})
    caching.open.set()
    assert [await rpc.level(1) for rpc in rpcs] == [8, 8, 8]
    assert caching.runner.ran == [8]
    paths = Counter(outcome.report.path for rpc in rpcs if isinstance(outcome := rpc.outcomes[1], Encoded))
    assert paths == {Path.EAGER: 1, Path.CACHE: 2}
    named = rpcs[0]
    lookup = CacheLookup("eight", None, None, DType.FLOAT32, 0.0)
    await named.submit({2: lookup, 3: CacheLookup("nine", None, None, DType.FLOAT32, 0.0)})
    assert await named.level(2) == 8
    assert isinstance(await named.outcome(3), NotCached)
    named.forget(1)
    await named.upload(4, item(8))
    assert await named.level(4) == 8
    stranger = caching.session(principal="stranger")
    await stranger.submit({1: lookup})
    assert isinstance(await stranger.outcome(1), NotCached)
    assert caching.runner.ran == [8]
    for rpc in (*rpcs, stranger):
        rpc.close()


async def test_readers_of_cached_rows_share_one_copy(caching: Rig) -> None:
    rpc = caching.session()
    await rpc.submit({1: item(8, content_id="eight")})
    assert await rpc.level(1) == 8
    rpc.forget(1)
    readers = [caching.session() for _ in range(3)]
    for reader in readers:
        await reader.submit({1: CacheLookup("eight", None, None, DType.FLOAT32, 0.0)})
        assert await reader.level(1) == 8
    await until(lambda: caching.used() <= 4096)
    for reader in readers[:2]:
        reader.close()
    assert await readers[2].level(1) == 8
    await rpc.submit({2: item(8)})
    assert await rpc.level(2) == 8
    rpc.close()
    readers[2].close()


async def test_the_item_of_a_session_that_leaves_runs_for_those_that_wait(caching: Rig) -> None:
    caching.open.clear()
    blocking, first, second = (caching.session() for _ in range(3))
    await blocking.submit({1: item(1, tokens=16)})
    await until(lambda: caching.scheduler.intake.is_empty)
    await first.submit({1: item(7)})
    await second.submit({1: item(7)})
    first.close()
    await until(lambda: caching.opened() == 2)
    caching.open.set()
    assert await second.level(1) == 7
    assert caching.runner.ran == [1, 7]
    blocking.close()
    second.close()


def lookup(content_id: str) -> CacheLookup:
    return CacheLookup(content_id, None, None, DType.FLOAT32, 0.0)


async def test_a_session_that_waits_for_its_own_upload_can_be_closed(caching: Rig) -> None:
    """It ends alone: whoever waits for the same item is answered."""
    rpc, other = caching.session(), caching.session()
    await rpc.session.reserve(1, item(content_id="x"))
    for each in (rpc, other):
        await each.submit({2: lookup("x"), 3: lookup("x")})
    rpc.close()
    assert [type(await other.outcome(key)) for key in (2, 3)] == [NotCached, NotCached]
    other.close()
    await caching.settle()
    assert caching.local.single_flight._expected == {}


@pytest.mark.parametrize("seed", range(3))
async def test_sessions_that_join_each_other_leave_nothing_behind(caching: Rig, seed: int) -> None:
    """Uploads, lookups, releases and cancellations of equal names in any order."""
    chance = random.Random(seed)
    rpcs = [caching.session(caller=str(number)) for number in range(2)]
    for key in range(200):
        rpc, name = chance.choice(rpcs), chance.choice("xy")
        sent = item(chance.choice([1, 2, BAD, BROKEN]), content_id=name)
        task: asyncio.Task[object]
        match chance.choice(["reserve", "upload", "submit", "ask", "ask", "ask", "release", "close", "close"]):
            case "reserve":
                task = asyncio.ensure_future(rpc.session.reserve(key, sent))
            case "upload":
                task = asyncio.ensure_future(rpc.upload(key, sent))
            case "submit":
                task = asyncio.ensure_future(rpc.submit({key: sent}))
            case "ask":
                task = asyncio.ensure_future(rpc.submit({key: lookup(name)}))
            case "release":
                for each in list(rpc.outcomes):
                    rpc.forget(each)
                continue
            case _:
                rpc.close()
                rpcs[rpcs.index(rpc)] = caching.session(caller=str(key))
                continue
        with suppress(Overloaded, TimeoutError):
            await asyncio.wait_for(task, chance.choice([0.0, 0.001, 0.05]))
    for rpc in rpcs:
        rpc.close()
    await caching.settle()
    assert caching.local.single_flight._expected == {}
