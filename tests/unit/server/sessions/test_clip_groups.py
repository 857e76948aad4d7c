"""Clips whose rows leave in groups, in every shape of sessions."""

import time
from dataclasses import replace

import numpy as np

from session_rig import BROKEN, Rig, film, item, until
from vitwire_server.core.errors import DeadlineExceeded, EncodeFailed
from vitwire_server.core.reports import Encoded


async def test_rows_leave_in_order_and_a_part_that_fails_ends_its_clip_alone(rig: Rig) -> None:
    rpc = rig.session()
    await rpc.submit({1: film(1, 2, 3), 2: film(5, BROKEN, 7), 3: replace(film(6, 6), keep_ratio=0.5), 4: item(9)})
    outcomes = [await rpc.outcome(key) for key in (1, 2, 3)]
    assert isinstance(outcomes[0], Encoded)
    assert np.frombuffer(outcomes[0].embedding.data, np.float32)[::16].tolist() == [1, 2, 3]
    assert sorted(rpc.parts) == [(row, [level] * 4) for row, level in ((0, 1), (0, 5), (4, 2), (8, 3))]
    assert (outcomes[0].report.tokens, type(outcomes[1]), 7 in rig.runner.ran) == (12, EncodeFailed, False)
    assert await rpc.level(4) == 9
    rpc.close()


async def test_a_deadline_in_the_middle_stops_the_other_parts(rig: Rig) -> None:
    rig.open.clear()
    rpc, due = rig.session(deadline=time.monotonic() + 0.5), time.monotonic() + 0.6
    await rpc.submit({1: film(1, 2, 3, 4)})
    await until(lambda: time.monotonic() > due)
    rig.open.set()
    assert isinstance(await rpc.outcome(1), DeadlineExceeded)
    await until(lambda: rig.scheduler.intake.is_empty)
    expired = rig.metrics.registry.get_sample_value("vitwire_expired_total", {"stage": "queue"})
    assert (rig.runner.ran, expired) == ([1], 1)
    rpc.close()


async def test_the_cache_and_those_who_wait_get_whole_clips(caching: Rig) -> None:
    caching.open.clear()
    rpcs = caching.session(), caching.session()
    for rpc in rpcs:
        await rpc.submit({1: film(1, 2, 3)})
    caching.open.set()
    outcomes = [await rpc.outcome(1) for rpc in rpcs]
    await rpcs[0].submit({2: film(1, 2, 3)})
    for outcome in (*outcomes, await rpcs[0].outcome(2)):
        assert isinstance(outcome, Encoded)
        assert np.frombuffer(outcome.embedding.data, np.float32)[::16].tolist() == [1, 2, 3]
    assert ([len(rpc.parts) for rpc in rpcs], caching.runner.ran) == ([3, 0], [1, 2, 3])
    for rpc in rpcs:
        rpc.close()
