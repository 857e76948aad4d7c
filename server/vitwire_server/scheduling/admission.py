"""Admission: how much may be in the server at once, in items and in bytes."""

from dataclasses import dataclass
from threading import Lock

from vitwire_server.core.errors import Overloaded


@dataclass(slots=True, eq=False)
class Permit:
    """The right to have items and bytes in the server; released once, by whoever holds it."""

    admission: "Admission"
    items: int
    nbytes: int

    def release(self) -> None:
        """Give everything back; a second call does nothing."""
        self.admission.give_back(self)
        self.items = self.nbytes = 0


class Admission:
    """Hands out permits up to a bound. Thread-safe.

    One request that is larger than the whole bound in bytes is let in when nothing else is, so
    that an admissible request can always be served.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._items = 0
        self._nbytes = 0

    def admit(self, items: int, nbytes: int) -> Permit:
        """A permit for `items` items of `nbytes` bytes. Raises Overloaded when full."""
        with self._lock:
            if self._items and self._items + items > self._max_items:
                raise Overloaded(
                    f"{self._items} items are queued of at most {self._max_items}",
                    reason="items",
                    retry_seconds=self._retry_seconds(),
                )
            if self._nbytes and self._nbytes + nbytes > self._max_bytes:
                raise Overloaded(
                    f"{self._nbytes} bytes are queued of at most {self._max_bytes}",
                    reason="bytes",
                    retry_seconds=self._retry_seconds(),
                )
            self._items += items
            self._nbytes += nbytes
            return Permit(self, items, nbytes)

    def give_back(self, permit: Permit) -> None:
        """Called by Permit.release."""
        with self._lock:
            self._items -= permit.items
            self._nbytes -= permit.nbytes

    @property
    def held(self) -> tuple[int, int]:
        """Items and bytes that are out on permits."""
        with self._lock:
            return self._items, self._nbytes

    def _retry_seconds(self) -> float:
        """Longer the fuller the queue is; between 0.1 and 1 second."""
        fill = max(self._items / self._max_items, self._nbytes / self._max_bytes)
        return min(1.0, max(0.1, fill))
