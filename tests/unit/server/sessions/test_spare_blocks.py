"""Blocks that an edge may write into before it asks."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from session_rig import SECONDS, SIZES, Rig, Runner, item, running, until
from vitwire_server.core.budgets import Budget
from vitwire_server.core.items import Item
from vitwire_server.core.runner import Running
from vitwire_server.scheduling.admission import Admission
from vitwire_server.sessions.messages import Done, Reply, ToRpc
from vitwire_server.sessions.remote import RemoteSessions


async def test_spare_blocks_are_replaced_while_a_session_is_open() -> None:
    async with running(Rig(cached=False, nbytes=SIZES["spares"]), "spares") as made:
        assert isinstance(made.sessions, RemoteSessions)
        full = len(made.sessions._spares)
        rpc = made.session()
        for key in range(2 * full):
            await rpc.submit({key: item(key)})
            assert await rpc.level(key) == key
            rpc.forget(key)
            await until(lambda: full // 2 < len(made.sessions._spares) <= full)
        rpc.close()


async def test_blocks_of_encoded_items_are_spare_again() -> None:
    """Also if the request is over; nothing more is granted. Those of cancelled items are not, as they may be read."""
    async with running(Rig(cached=False, nbytes=SIZES["spares"]), "spares") as rig:
        assert isinstance(rig.sessions, RemoteSessions)
        assert rig.host
        host, spares, all_of_them = rig.host, rig.sessions._spares, set(rig.sessions._spares)
        for key in range(20):
            rpc = rig.session()
            await rpc.submit({key: item(key), key + 1: item(key + 1)})
            if key % 2:
                assert await rpc.level(key) == key
            await until(lambda: set(host._spares) == all_of_them)  # the link need not have brought that yet
            rpc.close()
            await until(lambda: set(spares) == all_of_them)
        rig.open.clear()
        rpc = rig.session()
        await rpc.submit({1: item(1)})
        rpc.close()
        await until(lambda: not host._sessions)  # else the item might be encoded before it is cancelled
        rig.open.set()
        await rig.settle_memory()
        assert len(spares) == len(all_of_them) - 1
        assert set(spares) == set(host._spares) < all_of_them


async def test_blocks_that_are_not_pinned_are_spare_once() -> None:
    """The engine copies what lies in them once more. Here all but the first of them do."""
    async with running(Rig(cached=False, nbytes=SIZES["spares"], kept=1 << 20), "spares") as rig:
        assert isinstance(rig.sessions, RemoteSessions)
        assert rig.host
        host, spares, count = rig.host, rig.sessions._spares, len(rig.sessions._spares)
        rpc = rig.session()
        for key in range(4):
            await rpc.submit({key: item(key)})
            assert await rpc.level(key) == key
            assert len(spares) == len(host._spares) == count - key - 1
        rpc.close()


async def test_nothing_is_sent_if_no_spare_block_is_granted() -> None:
    """Half of this arena has no room for one."""
    async with running(Rig(cached=False, nbytes=1 << 20), "remote") as rig:
        came: list[type[ToRpc]] = []
        receive = rig.other._receive
        rig.other._receive = lambda message: (came.append(type(message)), receive(message))[1]
        rpc = rig.session()
        for key in range(3):
            await rpc.submit({key: item(key)})
            assert await rpc.level(key) == key
            rpc.forget(key)
        rpc.close()
        await rig.settle_memory()
        assert Counter(came) == {Reply: 6, Done: 3}


async def test_items_of_spare_blocks_are_copied_in_one_turn_at_most() -> None:
    """Nothing else runs in the process meanwhile; larger requests are copied in parts."""
    made = Rig(cached=False, nbytes=SIZES["spares"])
    made.admission = made.local.admission = Admission(12, 12 << 20)
    async with running(made, "spares") as rig:
        assert isinstance(rig.sessions, RemoteSessions)
        spares, left = rig.sessions._spares, []
        for count in (4, 5):
            rpc = rig.session()
            rig.open.clear()
            await rpc.submit({key: item(key, tokens=1 << 16) for key in range(count)})
            left.append(len(spares))
            rig.open.set()
            assert [await rpc.level(key) for key in range(count)] == list(range(count))
            rpc.close()
        assert left == [12, 16]


@dataclass
class Watching(Runner):
    """Notes whether items still have their own pixels after a while."""

    whole: list[bool] = field(default_factory=list)

    def launch(self, items: Sequence[Item], budget: Budget | None) -> Running:
        running = super().launch(items, budget)
        time.sleep(0.001)
        self.whole += [len(set(bytes(each.pixels.data))) == 1 for each in items]
        return running


async def restless(rig: Rig, seed: int) -> None:
    """Sessions with items around the size of a spare block that end at any point."""
    chance = random.Random(seed)
    for _ in range(30):
        rpc = rig.session()
        levels = {key: chance.randint(1, 60) for key in range(chance.choice((1, 1, 2, 5)))}
        tokens = chance.choice((1, 300, (1 << 16) - 1, 1 << 16, (1 << 16) + 1))
        submitting = asyncio.create_task(rpc.submit({key: item(levels[key], tokens) for key in levels}))
        await asyncio.wait([submitting], timeout=chance.choice((0, 0.001, SECONDS)))
        if submitting.done() and not submitting.exception() and chance.random() < 0.8:
            assert [await rpc.level(key) for key in levels] == list(levels.values())
        submitting.cancel()
        rpc.close()


async def test_blocks_stay_with_their_items_whatever_becomes_of_sessions() -> None:
    made = Rig(cached=False, nbytes=SIZES["spares"])
    made.admission = made.local.admission = Admission(12, 12 << 20)
    made.scheduler._runner = runner = Watching(made.memory, made.open)
    async with running(made, "spares") as rig:
        await asyncio.gather(*(restless(rig, seed) for seed in range(6)))
        assert all(runner.whole)
        assert len(runner.whole) > 20
