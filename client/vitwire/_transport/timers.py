"""Timers of many calls, in one thread."""

import threading
import time
from collections.abc import Callable


class Timers:
    """Calls functions after a time, from one thread, which runs while timers are set. Thread-safe.

    Most timers are cancelled long before they are due, so setting one wakes the thread only if it is the earliest.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._set: dict[object, tuple[float, Callable[[], object]]] = {}
        self._is_running = False
        self._wakes_at = 0.0

    def start(self, seconds: float, function: Callable[[], object]) -> object:
        """Call the function after `seconds`; returns the timer."""
        timer, due = object(), time.monotonic() + seconds
        with self._changed:
            self._set[timer] = due, function
            if not self._is_running:
                self._is_running = True
                self._wakes_at = due
                threading.Thread(target=self._run, name="vitwire-timers", daemon=True).start()
            elif due < self._wakes_at:
                self._changed.notify()
        return timer

    def cancel(self, timer: object) -> bool:
        """Whether the timer was cancelled before it was due."""
        with self._changed:
            return self._set.pop(timer, None) is not None

    def close(self) -> None:
        """Cancel all timers and end the thread."""
        with self._changed:
            self._set.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._set:
                    self._is_running = False
                    return
                self._wakes_at = min(due for due, _ in self._set.values())
                if (left := self._wakes_at - time.monotonic()) > 0:
                    self._changed.wait(left)
                now = time.monotonic()
                expired = [timer for timer, (due, _) in self._set.items() if due <= now]
                functions = [self._set.pop(timer)[1] for timer in expired]
            for function in functions:
                function()
