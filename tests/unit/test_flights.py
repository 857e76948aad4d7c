"""Items of one content are encoded once, and nobody waits for somebody who left."""

from dataclasses import dataclass, field

import pytest

from vitwire_server.caching.cache import Content, EmbeddingCache, Key, Name
from vitwire_server.caching.single_flight import Flights, Visit
from vitwire_server.core.errors import DeadlineExceeded, EncodeFailed, NotCached, Unavailable
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Ask, DType, Embedding, Modality
from vitwire_server.core.plans import Fallback
from vitwire_server.core.reports import Encoded, ItemReport, Outcome, Path
from vitwire_server.scheduling.tickets import Priority, Ticket

KEY = Key("", "", DType.FLOAT32, 0.5, Content(Modality.VIDEO, Grid(2, 2, 2), (), b"x"))
NAME = Name("", "", DType.FLOAT32, 0.5, "clip")


def encoded() -> Encoded:
    report = ItemReport(Path.EAGER, Fallback.GRAPHS_OFF, 0, 2, queued=1.0, encoded=2.0)
    return Encoded(Embedding(memoryview(bytes(8)), DType.FLOAT32, (2, 1), kept=(0, 3)), report)


@dataclass
class Tally:
    hits: int = 0
    misses: int = 0

    def cache_hit(self, modality: Modality) -> None:
        assert modality is Modality.VIDEO
        self.hits += 1

    def cache_missed(self) -> None:
        self.misses += 1


@dataclass
class Caller:
    """One item of an RPC, and what became of it."""

    flights: Flights
    priority: Priority = Priority.INTERACTIVE
    error: Unavailable | None = None
    ran: int = 0
    ticket: Ticket | None = None
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        ticket = self.ticket or Ticket(lambda *_: None, priority=self.priority)
        self.visit = Visit(KEY, NAME, ticket, self._run, self.outcomes.append)

    def enter(self) -> "Caller":
        self.ran += self.flights.enter(self.visit)
        return self

    def _run(self) -> None:
        if self.error:
            raise self.error
        self.ran += 1


@pytest.fixture
def tally() -> Tally:
    return Tally()


@pytest.fixture
def flights(tally: Tally) -> Flights:
    return Flights(EmbeddingCache(1 << 20), tally)


def test_identical_items_in_flight_are_encoded_once(flights: Flights, tally: Tally) -> None:
    callers = [Caller(flights).enter() for _ in range(4)]
    assert [each.ran for each in callers] == [1, 0, 0, 0]
    assert flights.holds(Caller(flights).visit)
    flights.landed(callers[0].visit, encoded())
    for each in callers[1:]:
        (outcome,) = each.outcomes
        assert isinstance(outcome, Encoded)
        assert (outcome.report.path, outcome.report.tokens, outcome.embedding.kept) == (Path.CACHE, 2, (0, 3))
    late = Caller(flights).enter()
    assert (late.ran, len(late.outcomes)) == (0, 1)
    assert (tally.hits, tally.misses) == (4, 1)
    assert flights._flights == {}


def test_a_failure_of_the_content_is_everybody_s(flights: Flights, tally: Tally) -> None:
    first, second = Caller(flights).enter(), Caller(flights).enter()
    error = EncodeFailed("not finite")
    flights.landed(first.visit, error)
    assert second.outcomes == [error]
    assert tally.hits == 0
    assert Caller(flights).enter().ran == 1, "a failure is not cached"


@pytest.mark.parametrize("how", ["leaves", "expires"])
def test_when_who_runs_gives_up_the_next_one_takes_over(flights: Flights, how: str) -> None:
    first, second, third = (Caller(flights).enter() for _ in range(3))
    if how == "leaves":
        flights.leave([first.visit])
    else:
        flights.landed(first.visit, DeadlineExceeded("too late"))
    assert (second.ran, third.ran) == (1, 0)
    flights.leave([third.visit])
    flights.landed(second.visit, encoded())
    assert third.outcomes == []
    assert flights._flights == {}


def test_all_visits_of_a_request_leave_before_another_request_takes_over(flights: Flights) -> None:
    """A visit of a request that is over would be encoded without a permit, and for nobody."""
    ticket = Ticket(lambda *_: None)
    cancelled = [Caller(flights, ticket=ticket).enter() for _ in range(100)]
    bystander = Caller(flights).enter()
    flights.leave([each.visit for each in cancelled])
    assert [sum(each.ran for each in cancelled), bystander.ran] == [1, 1]
    flights.landed(bystander.visit, encoded())
    assert flights._flights == {}


def test_a_deadline_that_passes_ends_every_item_of_its_request_and_no_other(flights: Flights) -> None:
    late = Ticket(lambda *_: None, deadline=1.0)
    expired = [Caller(flights, ticket=late).enter() for _ in range(10)]
    soon, never = (Caller(flights, ticket=Ticket(lambda *_: None, deadline=at)).enter() for at in (2.0, None))
    error = DeadlineExceeded("too late")
    flights.landed(expired[0].visit, error)
    assert [each.outcomes for each in expired[1:]] == [[error]] * 9, "the first was answered by its request"
    assert [soon.ran, never.ran] == [0, 1], "the request with the most time left takes over"
    flights.landed(never.visit, encoded())
    assert [isinstance(outcome, Encoded) for outcome in soon.outcomes] == [True]


def test_who_cannot_take_over_is_told_why(flights: Flights) -> None:
    first = Caller(flights).enter()
    second = Caller(flights, error=Unavailable("the server is shutting down")).enter()
    flights.leave([first.visit])
    assert second.outcomes == [second.error]
    assert flights._flights == {}


def test_nobody_waits_behind_a_lower_priority(flights: Flights) -> None:
    slow, fast = Caller(flights, Priority.BATCH).enter(), Caller(flights).enter()
    third = Caller(flights, Priority.BATCH).enter()
    assert (slow.ran, fast.ran, third.ran) == (1, 1, 0)
    flights.landed(fast.visit, encoded())
    assert len(third.outcomes) == 1
    flights.landed(slow.visit, encoded())
    assert flights._flights == {}


def test_an_ask_is_answered_from_what_the_name_stands_for(flights: Flights, tally: Tally) -> None:
    ask = Ask("clip", None, None, DType.FLOAT32, 0.5)
    assert isinstance(flights.find(NAME, ask), NotCached)
    flights.landed(Caller(flights).enter().visit, encoded())
    for modality in (None, Modality.VIDEO):
        for grid in (None, Grid(2, 2, 2)):
            found = flights.find(NAME, Ask("clip", modality, grid, DType.FLOAT32, 0.5))
            assert isinstance(found, Encoded)
            assert found.embedding.kept == (0, 3)
    assert isinstance(flights.find(NAME, Ask("clip", Modality.IMAGE, None, DType.FLOAT32, 0.5)), NotCached)
    assert isinstance(flights.find(NAME, Ask("clip", None, Grid(1, 4, 2), DType.FLOAT32, 0.5)), NotCached)
    assert (tally.hits, tally.misses) == (4, 4)
