"""Admission: how much may be in the server at once, in items and in bytes."""

from collections.abc import Callable, Sequence
from threading import Lock

from vitwire_server.core.errors import Overloaded


class Permit:
    """The right to have one item of some bytes in the server; released once, by whoever holds it."""

    def __init__(self, admission: "Admission", nbytes: int) -> None:
        self._admission = admission
        self._held = (1, nbytes)

    def release(self) -> None:
        """Give everything back; a second call does nothing."""
        held, self._held = self._held, (0, 0)
        self._admission._give_back(*held)  # noqa: SLF001 - the two are one


class Admission:
    """Hands out permits up to a bound. Thread-safe.

    What is larger than the whole bound is let in when nothing else is there, so that an admissible
    request can always be served.
    """

    def __init__(self, max_items: int, max_bytes: int, changed: Callable[[int, int], None] = lambda *_: None) -> None:
        """`changed` is told the items and bytes that are out on permits."""
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._changed = changed
        self._lock = Lock()
        self._items = 0
        self._nbytes = 0

    def admit(self, nbytes: Sequence[int]) -> list[Permit]:
        """A permit for each of items of so many bytes, all or none. Raises Overloaded when full."""
        items, together = len(nbytes), sum(nbytes)
        with self._lock:
            if self._items and self._items + items > self._max_items:
                raise self._full("items", self._items, self._max_items)
            if self._nbytes and self._nbytes + together > self._max_bytes:
                raise self._full("bytes", self._nbytes, self._max_bytes)
            self._count(items, together)
        return [Permit(self, each) for each in nbytes]

    @property
    def held(self) -> tuple[int, int]:
        """Items and bytes that are out on permits."""
        with self._lock:
            return self._items, self._nbytes

    def _give_back(self, items: int, nbytes: int) -> None:
        with self._lock:
            self._count(-items, -nbytes)

    def _count(self, items: int, nbytes: int) -> None:
        self._items += items
        self._nbytes += nbytes
        self._changed(self._items, self._nbytes)

    def _full(self, what: str, held: int, most: int) -> Overloaded:
        """Tells to come back later the fuller it is: after 0.1 to 1 second."""
        fill = max(self._items / self._max_items, self._nbytes / self._max_bytes)
        message = f"{held} {what} are in the server of at most {most}"
        return Overloaded(message, reason=what, retry_seconds=min(1.0, max(0.1, fill)))
