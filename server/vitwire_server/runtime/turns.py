"""Work on a second thread that takes turns with the thread that waits for it: one of the two runs at a time.

A forward is one call into a tower, which cannot return halfway. On a second thread it can wait halfway, and the
engine's thread launches batches meanwhile.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event, Semaphore, Thread, current_thread
from typing import TypeVar

Result = TypeVar("Result")


class Abandoned(BaseException):
    """Nobody waits for the work any more. Raised in the work where it waits."""


class Turns:
    """A second thread for one piece of work after the other, as libraries keep memory for each thread.

    The work calls `is_mine`, `is_over`, `wait` and `beside`; all else is called by the thread that waits for it.
    """

    def __init__(self) -> None:
        self._ends = 0.0
        self._given, self._returned = Semaphore(0), Semaphore(0)
        self._takes_turns = Event()
        """Not set while the work is within `beside`."""
        self._takes_turns.set()
        self._abandoned = False
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def of(self, work: Callable[[], Result], seconds: float) -> Generator[None, None, Result]:
        """Do `work`, a turn for each `next`. Returns what it returns, raises what it raises.

        A turn ends as soon as the work can wait after `seconds`, and is empty while it is within `beside`. Raises
        RuntimeError if no thread can be started.
        """
        results: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            self._given.acquire()
            try:
                results.append(work())
            except BaseException as error:  # noqa: BLE001 - it belongs to the thread that waits
                errors.append(error)
            self._returned.release()

        if self._thread is None:
            thread = Thread(target=self._run, name="capturing", daemon=True)
            thread.start()  # there may be no room for another
            self._thread = thread
        self._abandoned = False
        self._jobs.put(run)
        try:
            while self._next(seconds, results, errors):
                yield
        except BaseException:
            self._abandoned = True
            while self._next(seconds, results, errors):
                self._takes_turns.wait()
            errors.clear()
            raise
        if errors:
            raise errors.pop()  # kept here, it would keep its traceback, and that the memory of the work
        return results.pop()

    def close(self) -> None:
        """End the thread, between two pieces of work."""
        if self._thread:
            self._jobs.put(None)
            self._thread.join()

    def is_mine(self) -> bool:
        """Whether the calling thread does the work."""
        return current_thread() is self._thread

    def is_over(self) -> bool:
        """Whether this turn is over."""
        return time.perf_counter() >= self._ends

    def wait(self) -> None:
        """In the work: wait for the next turn. Raises Abandoned if there is none."""
        self._returned.release()
        self._given.acquire()
        if self._abandoned:
            raise Abandoned

    @contextmanager
    def beside(self) -> Iterator[None]:
        """In the work: both threads run within this context. Raises Abandoned at its end if the work was abandoned."""
        self._takes_turns.clear()
        self._returned.release()
        try:
            yield
        finally:
            self._takes_turns.set()
            self._given.acquire()
        if self._abandoned:
            raise Abandoned

    def _run(self) -> None:
        while job := self._jobs.get():
            job()
            del job  # with all that it keeps

    def _next(self, seconds: float, *ends: Sequence[object]) -> bool:
        """Let the work have a turn; whether it has more to do."""
        if not any(ends) and self._takes_turns.is_set():
            self._ends = time.perf_counter() + seconds
            self._given.release()
            self._returned.acquire()
        return not any(ends)
