"""One set of tests for sessions of an engine in this process, and for those of one that is a link away."""

import asyncio
import time

import pytest

from session_rig import BAD, BROKEN, SECONDS, WIDTH, Rig, Rpc, item, running, until
from vitwire_server.core.errors import (
    DeadlineExceeded,
    EncodeFailed,
    InvalidTensors,
    Overloaded,
    Unavailable,
)
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.core.plans import Fallback
from vitwire_server.core.reports import Encoded, Path


async def test_items_are_answered_with_their_rows_and_reports(rig: Rig) -> None:
    rpc = rig.session()
    await rpc.submit({1: item(10), 2: item(20, tokens=7)})
    await rpc.upload(3, item(30))
    assert [await rpc.level(key) for key in (1, 2, 3)] == [10, 20, 30]
    outcome = rpc.outcomes[2]
    assert isinstance(outcome, Encoded)
    assert (outcome.embedding.shape, outcome.embedding.dtype) == ((7, WIDTH), DType.FLOAT32)
    assert (outcome.report.path, outcome.report.tokens, outcome.report.fallback) == (Path.EAGER, 7, Fallback.GRAPHS_OFF)
    assert outcome.report.timings
    assert rig.admission.held[0] == 3, "until they are released"
    rpc.close()


async def test_large_items_do_not_hold_up_the_event_loop(rig: Rig) -> None:
    """Bytes are copied in parts, with other tasks in between; what arrives is whole."""
    large = Item(
        Modality.IMAGE,
        Grid(1, 4, 4),
        Pixels(bytes(900_000), DType.UINT8, (900_000,)),
        Footprint(16, 4, 1, 16),
        DType.FLOAT32,
        crops=Pixels(b"\x05" * 100_000, DType.UINT8, (100_000,)),
    )
    rpc = rig.session()
    await rpc.submit({1: large})
    assert await rpc.level(1) == 0
    rpc.close()


async def test_a_full_server_refuses_all_items_or_none(rig: Rig) -> None:
    rig.open.clear()
    other, rpc = rig.session(), rig.session()
    await other.submit({1: item(), 2: item()})
    held = rig.admission.held
    with pytest.raises(Overloaded) as full:
        await rpc.submit({key: item() for key in range(3)})
    assert (full.value.reason, rig.admission.held) == ("items", held)
    assert 0 < full.value.retry_seconds <= 1
    with pytest.raises(Overloaded) as full:
        await rpc.submit({key: item(tokens=20_000) for key in (3, 4)})
    assert (full.value.reason, rig.admission.held) == ("bytes", held)
    await rpc.submit({5: item(), 6: item()})
    third = rig.session()
    with pytest.raises(Overloaded):
        await third.session.reserve(1, item())
    for each in (other, rpc, third):
        each.close()
    assert rpc.faults == []


async def test_a_caller_with_too_many_unfinished_uploads_is_refused(rig: Rig) -> None:
    rpcs = [rig.session(caller="one") for _ in range(4)]
    for rpc in rpcs[:3]:
        await rpc.session.reserve(0, item())
    with pytest.raises(Overloaded) as full:
        await rpcs[3].session.reserve(0, item())
    assert full.value.reason == "uploads"
    another = rig.session(caller="another")
    await another.session.reserve(0, item())
    for rpc in (*rpcs, another):
        rpc.close()


@pytest.mark.parametrize("reserves", [True, False])
async def test_a_session_waits_for_what_it_holds_itself(rig: Rig, *, reserves: bool) -> None:
    rpc = rig.session()
    await rpc.submit({key: item(key) for key in range(4)})
    fifth = asyncio.create_task(rpc.upload(4, item(44)) if reserves else rpc.submit({4: item(44)}))
    assert [await rpc.level(key) for key in range(4)] == [0, 1, 2, 3]
    await asyncio.sleep(0.05)
    assert not fifth.done()
    rpc.forget(2)
    await asyncio.wait_for(fifth, SECONDS)
    assert await rpc.level(4) == 44
    assert rig.admission.held[0] == 4
    rpc.close()


async def test_an_item_that_was_not_submitted_is_dropped_by_its_release(rig: Rig) -> None:
    rpc = rig.session()
    await rpc.session.reserve(1, item())
    assert rig.admission.held[0] == 1
    rpc.session.release(1)
    rpc.session.release(1)
    await until(lambda: rig.admission.held == (0, 0))
    rpc.close()
    rpc.close()


async def test_a_closed_session_takes_nothing(rig: Rig) -> None:
    """Neither what is sent after the close, nor what is on its way at that moment."""
    rpc = rig.session()
    await rpc.session.reserve(1, item())
    rpc.close()
    with pytest.raises(Unavailable, match="has ended"):
        await rpc.session.reserve(2, item())
    with pytest.raises(Unavailable, match="has ended"):
        await rpc.submit({3: item()})
    with pytest.raises(Unavailable, match="has ended"):
        await rpc.submit({1: item()})
    rpc.session.release(1)
    other = rig.session()
    await other.submit({1: item(5)})
    assert await other.level(1) == 5
    other.close()


async def test_rows_stay_until_their_release(rig: Rig) -> None:
    """Other items come and go meanwhile, in memory that others gave back."""
    rpc, others = rig.session(), rig.session()
    await rpc.submit({1: item(11)})
    await rpc.outcome(1)
    for level in range(20):
        await others.upload(level, item(100 + level))
        assert await others.level(level) == 100 + level
        others.forget(level)
        assert await rpc.level(1) == 11
    rpc.close()
    others.close()


async def test_failures_are_outcomes_of_their_items(rig: Rig) -> None:
    rpc = rig.session()
    await rpc.submit({1: item(BAD), 2: item(2), 3: item(BROKEN)})
    outcomes = [await rpc.outcome(key) for key in (1, 3)]
    assert isinstance(outcomes[0], InvalidTensors)
    assert outcomes[0].reasons == {"pixels": "NaN"}
    assert isinstance(outcomes[1], EncodeFailed)
    assert str(outcomes[1]) == "broken"
    assert await rpc.level(2) == 2
    rpc.close()


async def test_deadlines(rig: Rig) -> None:
    late, soon = rig.session(deadline=time.monotonic() - 1), rig.session(deadline=time.monotonic() + 2)
    with pytest.raises(DeadlineExceeded):
        await late.submit({1: item()})
    with pytest.raises(DeadlineExceeded):
        await late.session.reserve(2, item())
    rig.open.clear()
    blocking = rig.session()
    await blocking.submit({1: item(1, tokens=16)})
    await until(lambda: rig.scheduler.intake.is_empty)
    await soon.submit({1: item(9)})
    await asyncio.sleep(2.1)
    rig.open.set()
    assert isinstance(await soon.outcome(1), DeadlineExceeded)
    assert 9 not in rig.runner.ran
    for rpc in (late, soon, blocking):
        rpc.close()


async def test_after_close_nothing_is_settled_or_runs(rig: Rig) -> None:
    rig.open.clear()
    rpc, next_ = rig.session(), rig.session()
    await rpc.submit({key: item(5 + key) for key in range(3)})
    rpc.close()
    await next_.submit({1: item(9)})
    rig.open.set()
    assert await next_.level(1) == 9
    assert rpc.outcomes == {}
    assert len([level for level in rig.runner.ran if level != 9]) <= 2, "what was on the device at most"
    next_.close()


async def test_a_server_that_shuts_down_says_so(rig: Rig) -> None:
    rig.scheduler.intake.close()
    rpc = rig.session()
    with pytest.raises(Unavailable, match="shutting down"):
        await rpc.submit({1: item()})
    rpc.close()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("shape", ["local", "remote"])
async def test_close_at_any_point_gives_everything_back(shape: str, *, cached: bool) -> None:
    async def work(rpc: Rpc) -> None:
        await rpc.upload(1, item(1))
        await rpc.submit({2: item(2), 3: item(1), 4: item(4)})
        waiting = asyncio.create_task(rpc.upload(5, item(5)))
        try:
            await rpc.outcome(2)
            rpc.forget(2)
            await waiting
            await rpc.level(5)
        finally:
            waiting.cancel()

    async with running(Rig(cached=cached), shape) as rig:
        finished = 0
        for turns in range(0, 90, 1 if shape == "remote" else 3):
            rpc = rig.session()
            task = asyncio.create_task(work(rpc))
            for _ in range(turns):
                await asyncio.sleep(0 if turns % 2 else 0.0003)
            finished += task.done()
            task.cancel()
            rpc.close()
            await asyncio.wait([task])
            assert task.cancelled() or not task.exception() or "has ended" in str(task.exception()), task
            await rig.settle()
        await asyncio.wait_for(work(rpc := rig.session()), SECONDS)
        rpc.close()
    assert finished < turns
