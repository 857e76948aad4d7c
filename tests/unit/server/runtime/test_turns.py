"""Work that takes turns with the thread that waits for it."""

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Event, Timer, current_thread

import pytest

from vitwire_server.runtime.turns import Abandoned, Turns


class Work:
    """Waits three times, unless it is abandoned or fails."""

    def __init__(self, turns: Turns, *, fails: bool = False) -> None:
        self.steps: list[str] = []
        self.running = False
        self._turns, self._fails = turns, fails

    def __call__(self) -> str:
        assert self._turns.is_mine()
        try:
            for number in range(3):
                self.running = True
                self.steps.append(str(number))
                if self._fails and number == 1:
                    raise KeyError(number)
                if self._turns.is_over():
                    self.running = False
                    self._turns.wait()
        except Abandoned:
            self.steps.append("abandoned")
            raise
        self.running = False
        return current_thread().name


@pytest.fixture
def turns() -> Iterator[Turns]:
    made = Turns()
    yield made
    made.close()
    assert made._thread
    assert not made._thread.is_alive()


def finished(turns: Turns) -> Work:
    """Work that is done turn by turn, and what it returns."""
    work = Work(turns)
    parts, seen = turns.of(work, 0.0), []
    while True:
        try:
            next(parts)
        except StopIteration as end:
            assert end.value == "capturing"
            break
        assert not work.running
        assert not turns.is_mine()
        seen.append(list(work.steps))
    assert seen == [["0"], ["0", "1"], ["0", "1", "2"]]
    return work


def test_one_of_the_threads_runs_at_a_time(turns: Turns) -> None:
    finished(turns)


def test_one_thread_does_all_work_and_keeps_none_of_it(turns: Turns) -> None:
    kept, thread = weakref.ref(finished(turns)), turns._thread
    finished(turns)
    assert turns._thread is thread
    assert kept() is None


def test_a_turn_may_be_long_enough_for_all(turns: Turns) -> None:
    work = Work(turns)
    with pytest.raises(StopIteration):
        next(turns.of(work, 600.0))
    assert work.steps == ["0", "1", "2"]


def test_what_the_work_raises_is_raised_where_it_is_waited_for(turns: Turns) -> None:
    parts = turns.of(Work(turns, fails=True), 0.0)
    next(parts)
    with pytest.raises(KeyError):
        next(parts)
    finished(turns)


def test_work_that_nobody_waits_for_ends_where_it_waits(turns: Turns) -> None:
    work = Work(turns)
    parts = turns.of(work, 0.0)
    next(parts)
    parts.close()
    assert work.steps == ["0", "abandoned"]
    finished(turns)


@dataclass
class Beside:
    """Waits for the other thread beside it, and for nothing else."""

    turns: Turns
    entered: Event = field(default_factory=Event)
    goes_on: Event = field(default_factory=Event)
    steps: list[str] = field(default_factory=list)
    fails: bool = False

    def __call__(self) -> None:
        try:
            with self.turns.beside():
                self.entered.set()
                assert self.goes_on.wait(60)
                if self.fails:
                    raise KeyError
            self.steps.append("a turn again")
        except BaseException as error:
            self.steps.append(type(error).__name__)
            raise


def test_turns_are_empty_beside_the_work(turns: Turns) -> None:
    work = Beside(turns)
    parts = turns.of(work, 600.0)
    for _ in range(3):
        next(parts)  # the work waits for what comes after this
        assert work.entered.wait(60)
    work.goes_on.set()
    for _ in parts:
        pass
    assert work.steps == ["a turn again"]
    finished(turns)


def test_what_is_raised_beside_is_raised_in_a_turn(turns: Turns) -> None:
    work = Beside(turns, fails=True)
    parts = turns.of(work, 600.0)
    next(parts)
    work.goes_on.set()
    with pytest.raises(KeyError):
        list(parts)
    finished(turns)


@pytest.mark.parametrize("fails", [True, False])
def test_abandoned_work_ends_after_what_runs_beside(turns: Turns, *, fails: bool) -> None:
    work = Beside(turns, fails=fails)
    parts = turns.of(work, 600.0)
    next(parts)
    assert work.entered.wait(60)
    timer = Timer(0.05, work.goes_on.set)
    timer.start()
    parts.close()
    timer.join()
    assert work.steps == ["KeyError" if fails else "Abandoned"]
    finished(turns)


@pytest.mark.parametrize("fails", [True, False])
def test_work_that_does_not_end_well_is_not_kept(turns: Turns, *, fails: bool) -> None:
    """Its frames have the tensors of a forward, which are to be free before garbage is collected."""
    collects = gc.isenabled()
    gc.disable()
    try:
        work = Work(turns, fails=fails)
        parts, kept = turns.of(work, 0.0), weakref.ref(work)
        del work
        next(parts)
        if fails:
            with pytest.raises(KeyError):
                next(parts)
        parts.close()
        del parts
        assert kept() is None
    finally:
        if collects:
            gc.enable()


def test_a_thread_that_could_not_be_started_is_started_later(turns: Turns) -> None:
    before = threading.stack_size(1 << 46)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            next(turns.of(Work(turns), 0.0))
    finally:
        threading.stack_size(before)
    finished(turns)
