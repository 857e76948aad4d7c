"""Admission: bounds the items and bytes in the server."""

from collections.abc import Callable, Sequence
from threading import Lock

from vitwire.shared.fairness.budgets import share_of
from vitwire_server.core.errors import Overloaded


class Permit:
    """The right to have one item of some bytes in the server; released once, by its holder."""

    def __init__(self, admission: "Admission", nbytes: int, promised_by: str | None = None) -> None:
        """`promised_by` is the caller whose share it counts against; None if it counts against nobody's."""
        self._admission = admission
        self._held = (1, nbytes)
        self._promised_by = promised_by

    def arrived(self) -> None:
        """The item no longer counts against the caller's share; a second call does nothing."""
        if self._promised_by is not None:
            self._admission._keep_promise(self._promised_by, *self._held)  # noqa: SLF001 - the two are one
            self._promised_by = None

    def release(self) -> None:
        """Give everything back; a second call does nothing."""
        self.arrived()
        held, self._held = self._held, (0, 0)
        self._admission._give_back(*held)  # noqa: SLF001 - the two are one


class Admission:
    """Hands out permits up to a bound. Thread-safe.

    A request larger than a bound is admitted while nothing else is held, so that every valid request can be
    served.
    """

    def __init__(self, max_items: int, max_bytes: int, changed: Callable[[int, int], None] = lambda *_: None) -> None:
        """`changed` is called with the items and bytes that permits hold."""
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._changed = changed
        self._lock = Lock()
        self._items = 0
        self._nbytes = 0
        self._promised: dict[str, tuple[int, int]] = {}
        """Items and bytes that count against each caller's share."""

    def admit(self, nbytes: Sequence[int], caller: str | None = None) -> list[Permit]:
        """A permit for each item, given its bytes; all or none. Raises Overloaded when full.

        Permits of a `caller`, for items that are not sent yet or must be decoded, take no more than a share of each
        bound until they have arrived, unless it has no others.
        """
        with self._lock:
            added, size = len(nbytes), sum(nbytes)
            items, held = self._promised.get(caller, (0, 0)) if caller is not None else (0, 0)
            if items and (items + added > share_of(self._max_items) or held + size > share_of(self._max_bytes)):
                message = f"this caller has {items} unfinished uploads of {held} bytes: wait until they are done"
                raise Overloaded(message, reason="uploads", retry_seconds=1.0)
            self._take(added, size)
            if caller is not None and added:
                self._promised[caller] = items + added, held + size
        return [Permit(self, each, caller) for each in nbytes]

    def promise(self, nbytes: int, caller: str) -> Permit:
        """A permit for an item whose bytes are still to come, see `admit`. Raises Overloaded when full."""
        (permit,) = self.admit([nbytes], caller)
        return permit

    @property
    def held(self) -> tuple[int, int]:
        """Items and bytes that permits hold."""
        with self._lock:
            return self._items, self._nbytes

    def _take(self, items: int, nbytes: int) -> None:
        if self._items and self._items + items > self._max_items:
            raise self._full("items", self._items, self._max_items)
        if self._nbytes and self._nbytes + nbytes > self._max_bytes:
            raise self._full("bytes", self._nbytes, self._max_bytes)
        self._count(items, nbytes)

    def _keep_promise(self, caller: str, items: int, nbytes: int) -> None:
        with self._lock:
            open_items, open_bytes = self._promised.pop(caller)
            if open_items > items:
                self._promised[caller] = open_items - items, open_bytes - nbytes

    def _give_back(self, items: int, nbytes: int) -> None:
        with self._lock:
            self._count(-items, -nbytes)

    def _count(self, items: int, nbytes: int) -> None:
        self._items += items
        self._nbytes += nbytes
        self._changed(self._items, self._nbytes)

    def _full(self, what: str, held: int, most: int) -> Overloaded:
        """The delay before a retry grows with how full the server is: 0.1 to 1 second."""
        fill = max(self._items / self._max_items, self._nbytes / self._max_bytes)
        message = f"the server is full: {held} of {most} {what} are held"
        return Overloaded(message, reason=what, retry_seconds=min(1.0, max(0.1, fill)))
