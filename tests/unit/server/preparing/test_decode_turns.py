"""Whose file is decoded next, without decoders."""

import asyncio
import random
from contextlib import suppress

import pytest

from vitwire_server.preparing.files.turns import Flow, Turn, Turns, predicted
from vitwire_server.scheduling.tickets import Priority

SHORT, LONG = 70_000, 3_000_000


class Line:
    """Jobs that wait for places, and in which order they got them."""

    def __init__(self, places: int) -> None:
        self.reported = 0
        self.turns = Turns(places, self._count)
        self.granted: list[str] = []
        self.running: dict[str, Turn] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, name: str, cost: int, flow: Flow) -> None:
        self.tasks[name] = asyncio.create_task(self._wait(name, cost, flow))
        await settled()

    async def finish(self, name: str = "", seconds: float = 0.0) -> None:
        """Job `name`, or that which runs longest, is done after so many seconds."""
        turn = self.running.pop(name or next(iter(self.running)))
        turn.since = asyncio.get_running_loop().time() - seconds
        self.turns.release(turn)
        await settled()

    async def finish_all(self) -> None:
        while self.running:
            await self.finish()
        assert (self.turns.waiting, self.reported) == (0, 0)
        assert not self.turns._callers
        assert not any(self.turns._levels.values())

    async def _wait(self, name: str, cost: int, flow: Flow) -> None:
        self.running[name] = await self.turns.acquire(flow, cost)
        self.granted.append(name)

    def _count(self) -> None:
        self.reported = self.turns.waiting


async def settled() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_a_decoder_that_lies_about_costs_holds_up_nobody() -> None:
    """A job that costs nothing left those behind it waiting, and the flow of one that costs less went first."""
    line = Line(places=1)
    await line.add("lie", predicted(-400_000), Flow("liar"))
    await line.add("honest", predicted(0), Flow("other"))
    await line.finish_all()
    assert line.granted == ["lie", "honest"]
    assert predicted(-(10**15)) == predicted(0)


@pytest.mark.parametrize(
    "other",
    [Flow("other"), Flow("many", "second connection"), Flow("many", "connection", 1)],
    ids=["caller", "connection", "request"],
)
async def test_a_flood_delays_others_by_one_job(other: Flow) -> None:
    line = Line(1)
    for number in range(60):
        await line.add(f"flood {number}", LONG, Flow("many", "connection"))
    for number in range(3):
        await line.add(f"other {number}", SHORT, other)
    assert line.granted == ["flood 0"]
    assert line.reported == 62
    for _ in range(3):
        await line.finish(seconds=0.07)
    assert line.granted == ["flood 0", "other 0", "other 1", "other 2"]
    await line.finish_all()


async def test_many_requests_and_connections_of_a_caller_are_one_share() -> None:
    line = Line(1)
    for number in range(30):
        await line.add(f"flood {number}", SHORT, Flow("many", f"connection {number % 5}", number))
    for number in range(5):
        await line.add(f"other {number}", SHORT, Flow("other"))
    for _ in range(10):
        await line.finish(seconds=0.07)
    assert sum(name.startswith("other") for name in line.granted) == 5
    await line.finish_all()


async def test_long_jobs_of_a_caller_leave_a_place() -> None:
    line = Line(3)
    for number in range(4):
        await line.add(f"long {number}", LONG, Flow("one"))
    assert line.granted == ["long 0", "long 1"]
    await line.add("short", SHORT, Flow("one", "other connection"))
    await line.finish("short", seconds=0.07)
    await line.add("of another", LONG, Flow("two"))
    assert line.granted == ["long 0", "long 1", "short", "of another"]
    await line.finish("of another", seconds=3)
    assert len(line.granted) == 4
    await line.finish("long 0", seconds=3)
    assert line.granted[-1] == "long 2"
    await line.finish_all()


async def test_a_caller_pays_for_jobs_that_take_longer_than_predicted() -> None:
    line = Line(1)
    for number in range(8):
        await line.add(f"liar {number}", SHORT, Flow("one"))
    for number in range(8):
        await line.add(f"other {number}", SHORT, Flow("two"))
    await line.finish("liar 0", seconds=5)
    for number in range(7):
        await line.finish(f"other {number}", seconds=0.07)
    assert line.granted == ["liar 0", *(f"other {number}" for number in range(8))]
    await line.finish_all()


async def test_a_caller_whose_jobs_take_longer_than_predicted_leaves_a_place() -> None:
    line = Line(2)
    for number in range(5):
        await line.add(f"liar {number}", SHORT, Flow("one"))
    assert line.granted == ["liar 0", "liar 1"]
    await line.finish("liar 0", seconds=5)
    await line.finish("liar 1", seconds=5)
    assert line.granted == ["liar 0", "liar 1", "liar 2"]
    await line.add("other", SHORT, Flow("two"))
    assert line.granted[-1] == "other"
    await line.finish_all()


async def test_interactive_jobs_go_first_and_batch_jobs_do_not_starve() -> None:
    line = Line(1)
    await line.add("first", SHORT, Flow("one"))
    for number in range(3):
        await line.add(f"batch {number}", SHORT, Flow("one", priority=Priority.BATCH))
    for number in range(40):
        await line.add(f"interactive {number}", SHORT, Flow("two"))
    for _ in range(40):
        await line.finish(seconds=0.07)
    places = [position for position, name in enumerate(line.granted) if name.startswith("batch")]
    assert places == [16, 32]
    await line.finish_all()


async def test_cancelled_jobs_leave_the_line() -> None:
    line = Line(1)
    await line.add("first", SHORT, Flow("one"))
    for number in range(5):
        await line.add(f"next {number}", SHORT, Flow("one"))
    for number in range(4):
        line.tasks[f"next {number}"].cancel()
    await settled()
    assert line.reported == 1
    await line.finish("first")
    assert line.granted == ["first", "next 4"]
    await line.finish_all()


@pytest.mark.parametrize("steps", range(3))
async def test_a_job_that_is_cancelled_as_it_gets_its_place_gives_it_back(steps: int) -> None:
    line = Line(1)
    await line.add("first", SHORT, Flow("one"))
    await line.add("second", SHORT, Flow("two"))
    await line.add("third", SHORT, Flow("two"))
    line.turns.release(line.running.pop("first"))
    for _ in range(steps):
        await asyncio.sleep(0)
    was_granted = "second" in line.granted
    line.tasks["second"].cancel()
    await settled()
    assert ("third" in line.granted) is not was_granted
    await line.finish_all()


async def test_a_cancelled_head_does_not_keep_its_flow_waiting() -> None:
    line = Line(1)
    await line.add("first", SHORT, Flow("one"))
    await line.add("second", SHORT, Flow("two"))
    await line.add("third", SHORT, Flow("two"))
    line.tasks["second"].cancel()  # its task has not run yet when the place is free
    line.turns.release(line.running.pop("first"))
    await settled()
    assert line.granted == ["first", "third"]
    await line.finish_all()


async def test_a_flood_is_searched_when_a_job_is_done_only(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = 0
    search = Turns._next

    def counted(turns: Turns) -> Turn | None:
        nonlocal searches
        searches += 1
        return search(turns)

    monkeypatch.setattr(Turns, "_next", counted)
    line = Line(2)
    for number in range(50):
        await line.add(f"long {number}", LONG, Flow("one", request=number))
    for number in range(1, 50):
        line.tasks[f"long {number}"].cancel()
    await settled()
    assert line.granted == ["long 0"]
    assert searches <= 2
    await line.finish_all()


async def test_a_cancelled_job_lets_a_shorter_one_behind_it_run() -> None:
    line = Line(2)
    for name, cost in (("first", LONG), ("second", LONG), ("short", SHORT)):
        await line.add(name, cost, Flow("one"))
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
            flow = Flow(
                f"caller {chance.randrange(4)}", f"{chance.randrange(2)}", chance.randrange(2),
                chance.choice(list(Priority)),
            )  # fmt: skip
            await line.add(f"job {number}", chance.choice([SHORT, LONG]), flow)
            if chance.random() < 0.3:
                line.tasks[chance.choice(list(line.tasks))].cancel()
            if line.running and chance.random() < 0.5:
                await line.finish(seconds=chance.choice([0.0, 0.1, 5.0]))
        await settled()
        await line.finish_all()
        for task in line.tasks.values():
            with suppress(asyncio.CancelledError):
                await task
