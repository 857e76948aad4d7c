"""Items of one content are encoded once, and waiters survive the caller that was encoding."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from vitwire_server.caching.cache import Content, EmbeddingCache, Key, Name
from vitwire_server.caching.single_flight import Joining, SingleFlight, Waiter
from vitwire_server.core.errors import DeadlineExceeded, EncodeFailed, EncoderError, NotCached, Unavailable
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import CacheLookup, DType, Embedding, Modality
from vitwire_server.core.plans import Fallback
from vitwire_server.core.reports import Encoded, ItemReport, Outcome, Path
from vitwire_server.scheduling.tickets import Priority, Ticket

KEY = Key("", "", DType.FLOAT32, 0.5, Content(Modality.VIDEO, Grid(2, 2, 2), (), b"x"))
NAME = Name("", "", DType.FLOAT32, 0.5, "clip")
OTHERS = [Name("", "", DType.FLOAT32, 0.5, content_id) for content_id in "ab"]
ERRORS = [None, EncodeFailed("not finite"), DeadlineExceeded("too late"), Unavailable("closed")]


def encoded() -> Encoded:
    report = ItemReport(Path.EAGER, Fallback.GRAPHS_OFF, 0, 2, queued=1.0, encoded=2.0)
    return Encoded(Embedding(memoryview(bytes(8)), DType.FLOAT32, (2, 1), kept=(0, 3)), report)


@dataclass
class CacheMonitor:
    hits: int = 0
    misses: int = 0

    def cache_hit(self, modality: Modality) -> None:
        assert modality is Modality.VIDEO
        self.hits += 1

    def cache_missed(self) -> None:
        self.misses += 1

    def served_from_device(self) -> None:
        raise AssertionError("the rows are on the host")


@dataclass
class Caller:
    """One item of an RPC, and what became of it."""

    single_flight: SingleFlight
    priority: Priority = Priority.INTERACTIVE
    error: Unavailable | None = None
    ran: int = 0
    ticket: Ticket | None = None
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        ticket = self.ticket or Ticket(lambda *_: None, priority=self.priority)
        self.waiter = Waiter(KEY, NAME, ticket, self._run, self.outcomes.append)

    def enter(self) -> "Caller":
        self.ran += self.single_flight.enter(self.waiter)
        return self

    def _run(self) -> None:
        if self.error:
            raise self.error
        self.ran += 1


@pytest.fixture
def monitor() -> CacheMonitor:
    return CacheMonitor()


@pytest.fixture
def single_flight(monitor: CacheMonitor) -> SingleFlight:
    return SingleFlight(EmbeddingCache(1 << 20), monitor)


def test_identical_items_in_flight_are_encoded_once(single_flight: SingleFlight, monitor: CacheMonitor) -> None:
    callers = [Caller(single_flight).enter() for _ in range(4)]
    assert [each.ran for each in callers] == [1, 0, 0, 0]
    assert single_flight.holds(Caller(single_flight).waiter)
    single_flight.completed(callers[0].waiter, encoded())
    for each in callers[1:]:
        (outcome,) = each.outcomes
        assert isinstance(outcome, Encoded)
        assert (outcome.report.path, outcome.report.tokens, outcome.embedding.kept) == (Path.CACHE, 2, (0, 3))
    late = Caller(single_flight).enter()
    assert (late.ran, len(late.outcomes)) == (0, 1)
    assert (monitor.hits, monitor.misses) == (4, 1)
    assert single_flight._flights == {}


def test_a_failure_of_the_content_answers_all_waiters(single_flight: SingleFlight, monitor: CacheMonitor) -> None:
    first, second = Caller(single_flight).enter(), Caller(single_flight).enter()
    error = EncodeFailed("not finite")
    single_flight.completed(first.waiter, error)
    assert second.outcomes == [error]
    assert monitor.hits == 0
    assert Caller(single_flight).enter().ran == 1, "a failure is not cached"


@pytest.mark.parametrize("how", ["leaves", "expires"])
def test_when_the_running_item_gives_up_the_next_is_promoted(single_flight: SingleFlight, how: str) -> None:
    first, second, third = (Caller(single_flight).enter() for _ in range(3))
    if how == "leaves":
        single_flight.leave([first.waiter])
    else:
        single_flight.completed(first.waiter, DeadlineExceeded("too late"))
    assert (second.ran, third.ran) == (1, 0)
    single_flight.leave([third.waiter])
    single_flight.completed(second.waiter, encoded())
    assert third.outcomes == []
    assert single_flight._flights == {}


def test_all_waiters_of_a_request_leave_before_another_request_is_promoted(single_flight: SingleFlight) -> None:
    """A waiter of a request that is over would be encoded without a permit, in vain."""
    ticket = Ticket(lambda *_: None)
    cancelled = [Caller(single_flight, ticket=ticket).enter() for _ in range(100)]
    bystander = Caller(single_flight).enter()
    single_flight.leave([each.waiter for each in cancelled])
    assert [sum(each.ran for each in cancelled), bystander.ran] == [1, 1]
    single_flight.completed(bystander.waiter, encoded())
    assert single_flight._flights == {}


def test_a_deadline_that_passes_ends_every_item_of_its_request_and_no_other(single_flight: SingleFlight) -> None:
    late = Ticket(lambda *_: None, deadline=1.0)
    expired = [Caller(single_flight, ticket=late).enter() for _ in range(10)]
    soon, never = (Caller(single_flight, ticket=Ticket(lambda *_: None, deadline=at)).enter() for at in (2.0, None))
    error = DeadlineExceeded("too late")
    single_flight.completed(expired[0].waiter, error)
    assert [each.outcomes for each in expired[1:]] == [[error]] * 9, "the first was answered by its request"
    assert [soon.ran, never.ran] == [0, 1], "the request with the most time left is promoted"
    single_flight.completed(never.waiter, encoded())
    assert [isinstance(outcome, Encoded) for outcome in soon.outcomes] == [True]


def test_a_waiter_that_cannot_be_promoted_gets_the_error(single_flight: SingleFlight) -> None:
    first = Caller(single_flight).enter()
    second = Caller(single_flight, error=Unavailable("the server is shutting down")).enter()
    single_flight.leave([first.waiter])
    assert second.outcomes == [second.error]
    assert single_flight._flights == {}


def test_no_waiter_waits_for_a_lower_priority(single_flight: SingleFlight) -> None:
    slow, fast = Caller(single_flight, Priority.BATCH).enter(), Caller(single_flight).enter()
    third = Caller(single_flight, Priority.BATCH).enter()
    assert (slow.ran, fast.ran, third.ran) == (1, 1, 0)
    single_flight.completed(fast.waiter, encoded())
    assert len(third.outcomes) == 1
    single_flight.completed(slow.waiter, encoded())
    assert single_flight._flights == {}


def test_a_lookup_is_answered_by_name(single_flight: SingleFlight, monitor: CacheMonitor) -> None:
    lookup = CacheLookup("clip", None, None, DType.FLOAT32, 0.5)
    assert isinstance(single_flight.find(NAME, lookup), NotCached)
    single_flight.completed(Caller(single_flight).enter().waiter, encoded())
    for modality in (None, Modality.VIDEO):
        for grid in (None, Grid(2, 2, 2)):
            found = single_flight.find(NAME, CacheLookup("clip", modality, grid, DType.FLOAT32, 0.5))
            assert isinstance(found, Encoded)
            assert found.embedding.kept == (0, 3)
    assert isinstance(
        single_flight.find(NAME, CacheLookup("clip", Modality.IMAGE, None, DType.FLOAT32, 0.5)), NotCached
    )
    assert isinstance(single_flight.find(NAME, CacheLookup("clip", None, Grid(1, 4, 2), DType.FLOAT32, 0.5)), NotCached)
    assert (monitor.hits, monitor.misses) == (4, 4)


@dataclass
class Asking:
    """An item without pixels, and what became of it."""

    single_flight: SingleFlight
    name: Name = NAME
    grid: Grid | None = None
    then: Callable[[], object] = lambda: None
    outcomes: list[Outcome] = field(default_factory=list)
    joining: Joining | None = None

    def ask(self) -> "Asking":
        lookup = CacheLookup(self.name.content_id, Modality.VIDEO, self.grid, DType.FLOAT32, 0.5)
        if found := self.single_flight.find(self.name, lookup):
            self.outcomes.append(found)
        else:
            self.joining = Joining(self.name, lookup, self._settle)
            self.single_flight.join(self.joining)
        return self

    def quit(self) -> None:
        assert self.joining
        self.single_flight.quit(self.joining)

    def _settle(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.then()


def test_every_item_that_waits_is_answered_although_the_first_expects_the_name_again(
    single_flight: SingleFlight,
) -> None:
    single_flight.expect(NAME)
    first = Asking(single_flight, then=lambda: single_flight.expect(NAME)).ask()
    others = [Asking(single_flight).ask() for _ in range(3)]
    single_flight.settled(NAME)
    assert [len(each.outcomes) for each in (first, *others)] == [1, 1, 1, 1]
    later = Asking(single_flight).ask()
    assert later.outcomes == [], "it waits for the new one"
    single_flight.settled(NAME)
    assert len(later.outcomes) == 1
    assert single_flight._expected == {}


def test_the_rows_of_any_item_of_the_name_will_do(single_flight: SingleFlight) -> None:
    """Other pixels of the name are still in flight; who wants another grid waits for them."""
    single_flight.expect(NAME)
    single_flight.expect(NAME)
    any_grid, other_grid = Asking(single_flight).ask(), Asking(single_flight, grid=Grid(9, 2, 2)).ask()
    outcome = encoded()
    single_flight._cache.put(KEY, outcome.embedding, {NAME})
    single_flight.settled(NAME)
    assert [len(each.outcomes) for each in (any_grid, other_grid)] == [1, 0]
    single_flight.settled(NAME, EncodeFailed("broken"))
    assert [type(outcome) for outcome in any_grid.outcomes + other_grid.outcomes] == [Encoded, EncodeFailed]


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_left_of_items_that_waited(single_flight: SingleFlight, seed: int) -> None:
    chance = random.Random(seed)
    expected: list[Name] = []
    asked: list[Asking] = []
    given_up: set[int] = set()
    names = [NAME, *OTHERS]

    def settle(name: Name, error: EncoderError | None) -> None:
        expected.remove(name)
        single_flight.settled(name, error)

    for _ in range(300):
        name = chance.choice(names)
        match chance.choice(["expect", "ask", "ask", "quit", "settle", "rows"]):
            case "expect":
                expected.append(name)
                single_flight.expect(name)
            case "ask":
                asked.append(Asking(single_flight, name, chance.choice([None, Grid(9, 9, 9)])).ask())
            case "quit" if waiting := [each for each in asked if not each.outcomes and id(each) not in given_up]:
                leaver = chance.choice(waiting)
                given_up.add(id(leaver))
                leaver.quit()
            case "settle" if name in expected:
                settle(name, chance.choice(ERRORS))
            case "rows" if name in expected:
                content = KEY.content._replace(digest=chance.randbytes(1))
                single_flight._cache.put(KEY._replace(content=content), encoded().embedding, {name})
                settle(name, None)
        pending = {each.name for each in asked if not each.outcomes and id(each) not in given_up}
        assert pending <= set(expected), "who waits, waits for an item"
    while expected:
        settle(expected[0], chance.choice(ERRORS))
    assert single_flight._expected == {}
    for each in asked:
        assert len(each.outcomes) == (id(each) not in given_up)
    assert any(isinstance(outcome, Encoded) for each in asked for outcome in each.outcomes)
    assert any(isinstance(outcome, NotCached) for each in asked for outcome in each.outcomes)
