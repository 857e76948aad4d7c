"""The queue's turns, and admission's accounts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitwire_server.core.errors import Overloaded
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.scheduling.admission import Admission
from vitwire_server.scheduling.queue import Queue
from vitwire_server.scheduling.tickets import Entry, Priority, Ticket


def entry(ticket: Ticket, index: int, nbytes: int = 3, tokens: int = 256) -> Entry:
    pixels = Pixels(bytes(nbytes), DType.UINT8, (1, nbytes))
    item = Item(Modality.IMAGE, Grid(1, 2, 2 * tokens), pixels, Footprint(4 * tokens, tokens, 1, 4), DType.FLOAT32)
    return Entry(ticket, index, item, 0.0)


def ticket() -> Ticket:
    return Ticket(lambda *_: None)


def test_a_large_request_does_not_starve_a_small_one() -> None:
    queue, large, small = Queue(), ticket(), ticket()
    for index in range(200):
        queue.push(entry(large, index))
    queue.push(entry(small, 0))
    first = queue.peek(3)
    assert [e.ticket for e in first] == [large, small, large]
    queue.take(first[:1])
    assert [e.ticket for e in queue.peek(2)] == [small, large], "who was served goes to the end of the line"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=60), st.integers(1, 70))
def test_every_entry_is_taken_once_in_the_order_of_its_request(pushes: list[tuple[int, int]], step: int) -> None:
    queue, tickets = Queue(), [ticket() for _ in range(5)]
    pushed = [entry(tickets[who], index, size) for index, (who, size) in enumerate(pushes)]
    for each in pushed:
        queue.push(each)
    assert len(queue) == len(pushed)
    assert queue.nbytes == sum(size for _, size in pushes)
    taken: list[Entry] = []
    while len(queue):
        turn = queue.peek(step)
        assert turn, "what waits is seen"
        queue.take(turn)
        taken += turn
    assert queue.nbytes == 0
    for one in tickets:
        assert [e for e in taken if e.ticket is one] == [e for e in pushed if e.ticket is one]


def test_remove_takes_one_request_out() -> None:
    queue, first, second = Queue(), ticket(), ticket()
    for index in range(3):
        queue.push(entry(first, index))
    queue.push(entry(second, 0))
    assert [e.index for e in queue.remove(first)] == [0, 1, 2]
    assert queue.remove(first) == []
    assert [e.ticket for e in queue.peek(9)] == [second]
    assert queue.nbytes == 3


def test_interactive_requests_go_before_batch_ones() -> None:
    queue, batch, interactive = Queue(), ticket(), ticket()
    batch.priority = Priority.BATCH
    queue.push(entry(batch, 0))
    queue.push(entry(interactive, 0))
    queue.push(entry(interactive, 1))
    assert [e.ticket for e in queue.peek(9)] == [interactive, interactive, batch]
    assert [e.ticket for e in queue.peek(1)] == [interactive]


def test_a_batch_item_leads_every_sixteenth_batch_so_that_it_does_not_starve() -> None:
    queue, batch = Queue(), ticket()
    batch.priority = Priority.BATCH
    queue.push(entry(batch, 0))
    queue.push(entry(batch, 1))
    led: list[int] = []
    for number in range(40):
        queue.push(entry(ticket(), 0))
        window = queue.window(64, tokens=256)
        led += [number] if window[0].ticket is batch else []
        queue.take(window)
    assert led == [15, 31]


def test_the_window_is_one_batch_and_at_least_one_item() -> None:
    queue, only = Queue(), ticket()
    for index, tokens in enumerate((1000, 50, 50, 50)):
        queue.push(entry(only, index, tokens=tokens))
    assert [e.index for e in queue.window(64, tokens=120)] == [0]
    queue.take(queue.window(64, tokens=120))
    assert [e.index for e in queue.window(64, tokens=120)] == [1, 2]
    assert [e.index for e in queue.window(1, tokens=120)] == [1]


def test_only_work_of_the_same_or_a_higher_priority_is_ahead() -> None:
    queue, interactive, batch = Queue(), ticket(), ticket()
    batch.priority = Priority.BATCH
    queue.push(entry(interactive, 0, tokens=100))
    queue.push(entry(batch, 0, tokens=700))
    assert queue.tokens_ahead(Priority.INTERACTIVE, 10_000) == 100
    assert queue.tokens_ahead(Priority.BATCH, 10_000) == 800
    assert queue.tokens_ahead(Priority.BATCH, 44) == 100 + 44 + 256, "of each request as much, and a turn"


class TestAdmission:
    def test_refuses_beyond_items_and_beyond_bytes(self) -> None:
        changes: list[tuple[int, int]] = []
        admission = Admission(2, 100, lambda *held: changes.append(held))
        (first,) = admission.admit([60])
        with pytest.raises(Overloaded) as full:
            admission.admit([60])
        assert full.value.reason == "bytes"
        assert 0.1 <= full.value.retry_seconds <= 1
        admission.admit([10])
        with pytest.raises(Overloaded) as full:
            admission.admit([0])
        assert full.value.reason == "items"
        first.release()
        assert admission.held == (1, 10)
        assert changes == [(1, 60), (2, 70), (1, 10)]

    def test_what_is_larger_than_everything_is_let_in_alone(self) -> None:
        admission = Admission(max_items=2, max_bytes=100)
        permits = admission.admit([200] * 5)
        assert admission.held == (5, 1000)
        for permit in permits * 2:
            permit.release()
        assert admission.held == (0, 0)

    def test_items_are_admitted_all_or_none(self) -> None:
        admission = Admission(max_items=4, max_bytes=100)
        admission.admit([1])
        with pytest.raises(Overloaded):
            admission.admit([1] * 4)
        assert admission.held == (1, 1)

    def test_what_one_caller_promised_leaves_room_for_others(self) -> None:
        """24 uploads of 178 MB would fill 4 GiB; a caller may have three quarters of it open."""
        admission = Admission(max_items=4096, max_bytes=4 << 30)
        promises = [admission.promise(178_000_000, "one") for _ in range((3 << 30) // 178_000_000)]
        with pytest.raises(Overloaded) as full:
            admission.promise(178_000_000, "one")
        assert full.value.reason == "uploads"
        admission.promise(178_000_000, "other").release()
        admission.admit([178_000_000])[0].release()
        promises[0].arrived()
        promises.append(admission.promise(178_000_000, "one"))
        for permit in promises * 2:
            permit.release()
        assert (admission.held, admission._promised) == ((0, 0), {})

    def test_what_waits_of_one_caller_leaves_room_for_others(self) -> None:
        admission = Admission(max_items=8, max_bytes=1000)
        permits = admission.admit([1] * 5, "one")
        with pytest.raises(Overloaded, match="this caller has 5"):
            admission.admit([1, 1], "one")
        permits += admission.admit([1], "one") + admission.admit([1, 1], "other")
        for permit in permits:
            permit.release()
        assert (admission.held, admission._promised) == ((0, 0), {})

    def test_the_only_promise_of_a_caller_may_be_as_large_as_the_bound(self) -> None:
        admission = Admission(max_items=1, max_bytes=100)
        admission.promise(200, "one").release()
        assert admission.held == (0, 0)
