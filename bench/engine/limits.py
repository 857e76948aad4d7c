"""A run that ends in time, and leaves no process behind."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

GRACE = 60
"""Seconds for an orderly end after the time limit."""


class OutOfTime(SystemExit):
    """The time is over, or SIGTERM came. Not an Exception, so that nothing keeps it."""


class Clock:
    """What is left of a time limit in seconds."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


@contextmanager
def limited(clock: Clock, last_words: Callable[[], None]) -> Iterator[None]:
    """Raise OutOfTime in the block when the time is over; `GRACE` later say the last words, kill children and exit."""

    def interrupt(*_: object) -> None:
        raise OutOfTime("the time limit is over, or the benchmark was ended")

    def give_up() -> None:
        last_words()
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(1)

    main = threading.main_thread().ident or 0
    timers = [
        threading.Timer(max(0.0, clock.left), signal.pthread_kill, (main, signal.SIGTERM)),
        threading.Timer(max(0.0, clock.left) + GRACE, give_up),
    ]
    before = signal.signal(signal.SIGTERM, interrupt)
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        signal.signal(signal.SIGTERM, before)
