"""Who gets the next place, at decoders and in the gateway."""

import asyncio
import random
from collections.abc import Hashable
from contextlib import suppress

import pytest

from vitwire.shared.fairness.places import Place, Places
from vitwire.shared.fairness.shares import Path
from vitwire_server.preparing.files.pool import places_of, predicted
from vitwire_server.scheduling.tickets import Priority

SHORT, LONG = 70_000, 3_000_000


def flow(caller: str, connection: str = "", request: int = 0, priority: Priority = Priority.INTERACTIVE) -> Path:
    return priority, caller, connection, request


class Line:
    """Jobs that wait for places, and in which order they got them."""

    def __init__(self, places: int) -> None:
        self.reported = 0
        self.places = places_of(places, self._count)
        self.granted: list[str] = []
        self.running: dict[str, Place] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, name: str, cost: int, to: Path) -> None:
        self.tasks[name] = asyncio.create_task(self._wait(name, cost, to))
        await settled()

    async def add_all(self, name: str, count: int, cost: int, to: Path) -> None:
        for number in range(count):
            await self.add(f"{name} {number}", cost, to)

    async def finish(self, name: str = "", seconds: float = 0.0) -> None:
        """Job `name`, or that which runs longest, is done after so many seconds."""
        place = self.running.pop(name or next(iter(self.running)))
        place.since = asyncio.get_running_loop().time() - seconds
        self.places.give_back(place)
        await settled()

    async def finish_all(self) -> None:
        while self.running:
            await self.finish()
        assert (self.places.waiting, self.reported) == (0, 0)
        assert not self.places._paces
        assert not self.places._line
        assert (self.places.used, self.places._holdings) == (0, set())

    async def _wait(self, name: str, cost: int, to: Path) -> None:
        self.running[name] = await self.places.acquire(to, cost)
        self.granted.append(name)

    def _count(self) -> None:
        self.reported = self.places.waiting


async def settled() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_a_decoder_that_lies_about_costs_holds_up_nobody() -> None:
    """A job that costs nothing left those behind it waiting, and the flow of one that costs less went first."""
    line = Line(places=1)
    await line.add("lie", predicted(-400_000), flow("liar"))
    await line.add("honest", predicted(0), flow("other"))
    await line.finish_all()
    assert line.granted == ["lie", "honest"]
    assert predicted(-(10**15)) == predicted(0)


@pytest.mark.parametrize(
    "other",
    [flow("other"), flow("many", "second connection"), flow("many", "connection", 1)],
    ids=["caller", "connection", "request"],
)
async def test_a_flood_delays_others_by_one_job(other: Path) -> None:
    line = Line(1)
    await line.add_all("flood", 60, LONG, flow("many", "connection"))
    await line.add_all("other", 3, SHORT, other)
    assert line.granted == ["flood 0"]
    assert line.reported == 62
    for _ in range(3):
        await line.finish(seconds=0.07)
    assert line.granted == ["flood 0", "other 0", "other 1", "other 2"]
    await line.finish_all()


async def test_many_requests_and_connections_of_a_caller_are_one_share() -> None:
    line = Line(1)
    for number in range(30):
        await line.add(f"flood {number}", SHORT, flow("many", f"connection {number % 5}", number))
    await line.add_all("other", 5, SHORT, flow("other"))
    for _ in range(10):
        await line.finish(seconds=0.07)
    assert sum(name.startswith("other") for name in line.granted) == 5
    await line.finish_all()


async def test_long_jobs_of_a_caller_leave_a_place() -> None:
    line = Line(3)
    await line.add_all("long", 4, LONG, flow("one"))
    assert line.granted == ["long 0", "long 1"]
    await line.add("short", SHORT, flow("one", "other connection"))
    await line.finish("short", seconds=0.07)
    await line.add("of another", LONG, flow("two"))
    assert line.granted == ["long 0", "long 1", "short", "of another"]
    await line.finish("of another", seconds=3)
    assert len(line.granted) == 4
    await line.finish("long 0", seconds=3)
    assert line.granted[-1] == "long 2"
    await line.finish_all()


async def test_a_caller_pays_for_jobs_that_take_longer_than_predicted() -> None:
    line = Line(1)
    await line.add_all("liar", 8, SHORT, flow("one"))
    await line.add_all("other", 8, SHORT, flow("two"))
    await line.finish("liar 0", seconds=5)
    for number in range(7):
        await line.finish(f"other {number}", seconds=0.07)
    assert line.granted == ["liar 0", *(f"other {number}" for number in range(8))]
    await line.finish_all()


async def test_a_caller_whose_jobs_take_longer_than_predicted_leaves_a_place() -> None:
    line = Line(2)
    await line.add_all("liar", 5, SHORT, flow("one"))
    assert line.granted == ["liar 0", "liar 1"]
    await line.finish("liar 0", seconds=5)
    await line.finish("liar 1", seconds=5)
    assert line.granted == ["liar 0", "liar 1", "liar 2"]
    await line.add("other", SHORT, flow("two"))
    assert line.granted[-1] == "other"
    await line.finish_all()


async def test_interactive_jobs_go_first_and_batch_jobs_do_not_starve() -> None:
    line = Line(1)
    await line.add("first", SHORT, flow("one"))
    await line.add_all("batch", 3, SHORT, flow("one", priority=Priority.BATCH))
    await line.add_all("interactive", 40, SHORT, flow("two"))
    for _ in range(40):
        await line.finish(seconds=0.07)
    places = [position for position, name in enumerate(line.granted) if name.startswith("batch")]
    assert places == [16, 32]
    await line.finish_all()


async def test_cancelled_jobs_leave_the_line() -> None:
    line = Line(1)
    await line.add("first", SHORT, flow("one"))
    await line.add_all("next", 5, SHORT, flow("one"))
    for number in range(4):
        line.tasks[f"next {number}"].cancel()
    await settled()
    assert line.reported == 1
    await line.finish("first")
    assert line.granted == ["first", "next 4"]
    await line.finish_all()


@pytest.mark.parametrize("steps", range(-1, 3))
async def test_a_job_that_is_cancelled_as_it_gets_its_place_gives_it_back(steps: int) -> None:
    """Or just before: its task has not run yet when the place is free."""
    line = Line(1)
    for name, caller in (("first", "one"), ("second", "two"), ("third", "two")):
        await line.add(name, SHORT, flow(caller))
    if steps < 0:
        line.tasks["second"].cancel()
    line.places.give_back(line.running.pop("first"))
    for _ in range(steps):
        await asyncio.sleep(0)
    was_granted = "second" in line.granted
    if steps >= 0:
        line.tasks["second"].cancel()
    await settled()
    assert line.granted == ["first", "second" if was_granted else "third"]
    await line.finish_all()


async def test_a_flood_is_searched_when_a_job_is_done_only(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = 0
    search = Places._next

    def counted(places: Places) -> Place | None:
        nonlocal searches
        searches += 1
        return search(places)

    monkeypatch.setattr(Places, "_next", counted)
    line = Line(2)
    for number in range(50):
        await line.add(f"long {number}", LONG, flow("one", request=number))
    for number in range(1, 50):
        line.tasks[f"long {number}"].cancel()
    await settled()
    assert line.granted == ["long 0"]
    assert searches <= 2
    await line.finish_all()


async def test_a_cancelled_job_lets_a_shorter_one_behind_it_run() -> None:
    line = Line(2)
    for name, cost in (("first", LONG), ("second", LONG), ("short", SHORT)):
        await line.add(name, cost, flow("one"))
    assert line.granted == ["first"]
    line.tasks["second"].cancel()
    await settled()
    assert line.granted == ["first", "short"]
    await line.finish_all()


async def test_nothing_is_left_of_any_traffic() -> None:
    chance = random.Random(7)
    for _ in range(20):
        line = Line(chance.randint(1, 3))
        for number in range(60):
            to = flow(
                f"caller {chance.randrange(4)}", f"{chance.randrange(2)}", chance.randrange(2),
                chance.choice(list(Priority)),
            )  # fmt: skip
            await line.add(f"job {number}", chance.choice([SHORT, LONG]), to)
            if chance.random() < 0.3:
                line.tasks[chance.choice(list(line.tasks))].cancel()
            if line.running and chance.random() < 0.5:
                await line.finish(seconds=chance.choice([0.0, 0.1, 5.0]))
        await settled()
        await line.finish_all()
        for task in line.tasks.values():
            with suppress(asyncio.CancelledError):
                await task


# -- jobs whose time nobody predicts ---------------------------------------------------------------


async def test_one_place_is_left_to_whoever_worked_least() -> None:
    places, order = Places(2), list[Hashable]()
    attacker, honest = flow("attacker"), flow("honest")
    running = await places.acquire(attacker)

    async def work(to: Path) -> None:
        async with places.place(to):
            order.append(to[1])
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(work(attacker)) for _ in range(5)]
    await asyncio.sleep(0.02)
    assert order == [], "one place is left to others"
    tasks.append(asyncio.create_task(work(honest)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["honest"]
    tasks[0].cancel()
    places.give_back(running)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["honest"] + ["attacker"] * 4
    assert not places._paces
    assert not places._line
    assert (places.used, places._holdings) == (0, set())


async def test_a_new_request_of_the_same_caller_does_not_wait_for_the_old_ones() -> None:
    places, order = Places(1), list[Path]()
    large, small = flow("a"), flow("a", request=1)

    async def work(to: Path) -> None:
        async with places.place(to):
            order.append(to)
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(work(large)) for _ in range(6)]
    await asyncio.sleep(0.025)
    tasks.append(asyncio.create_task(work(small)))
    await asyncio.gather(*tasks)
    assert order.index(small) < 6


async def test_places_of_one_caller_go_to_all_of_its_requests() -> None:
    """Also before the first job has ended, and so was paid for."""
    places = Places(5)
    other = [await places.acquire(flow("a", request=number)) for number in range(3)]
    requests = [flow("b", request=number) for number in range(3)]
    waiting = [asyncio.create_task(places.acquire(each)) for each in requests for _ in range(5)]
    await asyncio.sleep(0)
    for place in other:
        places.give_back(place)
    await asyncio.sleep(0)
    granted = [task.result() for task in waiting if task.done()]
    assert {each.path for each in granted[1:]} == set(requests)
    for place in granted:
        places.give_back(place)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


# -- places that others may take -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
async def test_no_place_is_lost_or_given_twice(seed: int) -> None:
    """Jobs that wait for a time, are cancelled, lose their places, and end: no caller has more than its share."""
    chance = random.Random(seed)
    most, long = chance.randint(1, 8), chance.choice([-1, 1000])
    places = Places(most, long=long, grace=chance.choice([0.0, 0.002, 60.0]))

    async def job() -> None:
        to = chance.choice([0, 1]), chance.choice("abc"), chance.choice("xy"), chance.randrange(3)
        wait = chance.choice([None, 0.0, 0.001, 0.02])
        place = await places.acquire(to, chance.choice([1, 5000]), is_open=chance.random() < 0.1, wait=wait)
        try:
            place.begin()
            async with asyncio.timeout(0.0 if place.is_lost else None) as place.limit:
                for _ in range(chance.randrange(3)):
                    held = [each for each in places._holdings if each.held]
                    assert len(held) == places.used <= most
                    callers = [each.caller for each in held if each.caller]
                    assert all(callers.count(each) <= places.share for each in callers)
                    await asyncio.sleep(chance.choice([0.0, 0.001]))
        finally:
            places.give_back(place)

    jobs = list[asyncio.Task[None]]()
    for _ in range(150):
        jobs.append(asyncio.create_task(job()))
        if chance.random() < 0.3:
            chance.choice(jobs).cancel()
        if chance.random() < 0.3:
            await asyncio.sleep(chance.choice([0.0, 0.001]))
    async with asyncio.timeout(20):
        for ended in await asyncio.gather(*jobs, return_exceptions=True):
            assert ended is None or isinstance(ended, asyncio.CancelledError | TimeoutError)
    assert (places.used, places._holdings, places._by_caller) == (0, set(), {})
    assert (places._paces, places._uncontested) == ({}, set())
    assert not any(level.inner or level.costs or level.backlog for level in places._line._levels)


async def test_connections_of_a_caller_over_its_share_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1,000 of them each message took 10 ms, and others waited too."""
    places, searched = Places(4), 0
    held = [await places.acquire((0, "many", number)) for number in range(3)]
    waiting = [asyncio.create_task(places.acquire((0, "many", number))) for number in range(3, 103)]
    await settled()
    charge = Places._charge_share

    def counted(self: Places, place: Place) -> None:
        nonlocal searched
        searched += 1
        charge(self, place)

    monkeypatch.setattr(Places, "_charge_share", counted)
    places.give_back(held.pop())
    assert (places.waiting, searched) == (99, 1)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
