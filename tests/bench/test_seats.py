"""Processes of the engine bench that fail, end, hang, or do not end."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from bench.engine import seat
from bench.engine.seat import ClientPlace, Seat, SeatFailed, ask
from bench.engine.seat import seated as seats_of

from seat_process import answering


@contextmanager
def seated(*indices: int) -> Iterator[list[Seat]]:
    with seats_of([ClientPlace(index, {}) for index in indices]) as seats:
        assert [each.answer(60)["index"] for each in seats] == list(indices)
        yield seats


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat, "serve", answering)


def test_a_process_that_fails_can_be_asked_again_and_so_can_others() -> None:
    with seated(0, 1) as seats:
        assert ask(seats, [1, 2], 60) == [1, 2]
        with pytest.raises(SeatFailed, match="it did not work"):
            ask(seats, ["fail", 4], 60)
        assert ask(seats, [5, 6], 60) == [5, 6]


def test_a_process_that_ends_fails_and_others_go_on() -> None:
    with seated(0, 1) as seats:
        with pytest.raises(SeatFailed, match="has ended"):
            ask(seats, [1, "die"], 60)
        with pytest.raises(SeatFailed, match="has ended"):
            ask(seats, [1, 2], 60)
        assert ask(seats[:1], [3], 60) == [3]


def test_a_process_that_does_not_answer_is_given_up() -> None:
    """A late answer is not taken for the answer to the next question."""
    with seated(0, 1) as seats:
        with pytest.raises(SeatFailed, match="no answer after"):
            ask(seats, ["hang", 2], 0.2)
        with pytest.raises(SeatFailed, match="no answer after"):
            ask(seats[:1], [3], 60)
        assert ask(seats[1:], [4], 60) == [4]


def test_a_process_that_does_not_end_is_killed_with_its_descendants() -> None:
    stuck = Seat(ClientPlace(9, {}))
    child = psutil.Process(stuck.answer(60)["child"])
    stuck.close(0.2)
    assert child.wait(60) is not None or not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
