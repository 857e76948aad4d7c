"""The queue that requests hand in items to, and the engine's thread takes them from."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Condition

from vitwire_server.core.errors import DeadlineExceeded, Unavailable
from vitwire_server.core.grids import Footprint
from vitwire_server.core.plans import Batch
from vitwire_server.core.reports import Monitor, Waiting
from vitwire_server.scheduling.forecast import Forecast
from vitwire_server.scheduling.planner import Planner
from vitwire_server.scheduling.queue import Queue
from vitwire_server.scheduling.tickets import Entry, Priority, Ticket

_WINDOW = 64


@dataclass(frozen=True, slots=True)
class NextBatch:
    """Entries that left the queue: entries to run as one batch, and entries that are void."""

    batch: Batch | None
    """None if nothing waits."""
    window: Sequence[Footprint]
    """The items that waited for this batch, and were planned."""
    entries: Sequence[Entry]
    expired: Sequence[Entry]


class Intake:
    """The queue with its lock. Thread-safe; `wait`, `take`, `answered` and `abandon` belong to the engine's thread."""

    def __init__(self, planner: Planner, forecast: Forecast, monitor: Monitor, clock: Callable[[], float]) -> None:
        self.planner = planner
        """Replaced whole by the engine's thread; others may use either."""
        self._forecast = forecast
        self._monitor = monitor
        self._clock = clock
        self._queue = Queue()
        self._changed = Condition()
        self._closed = False
        self._unanswered: set[Entry] = set()
        """Entries that were taken and not answered yet."""
        monitor.watch_queue(self.waiting)

    def now(self) -> float:
        """Seconds on the clock that deadlines are given in."""
        return self._clock()

    def submit(self, entries: Iterable[Entry]) -> None:
        """Queue items. Raises Unavailable after `close`."""
        with self._changed:
            if self._closed:
                raise Unavailable("the server is shutting down")
            for entry in entries:
                self._queue.push(entry)
            self._changed.notify()

    def check_deadline(self, ticket: Ticket, tokens: int, items: int = 1) -> None:
        """Raises DeadlineExceeded if items of `tokens` tokens cannot be done by the ticket's deadline.

        Counts what goes before them by their share, what is under way, and the time that they take.
        """
        if ticket.deadline is None:
            return
        left = ticket.deadline - self._clock()
        needed = self.forecast(ticket.priority, tokens)
        if needed <= left:
            return
        for _ in range(items):
            self._monitor.item_dropped("admission", "deadline")
        raise DeadlineExceeded(f"about {needed:.3g} s are needed, {max(0.0, left):.3g} s are left until the deadline")

    def forecast(self, priority: Priority, tokens: int) -> float:
        """Seconds until a new request of `tokens` tokens would be done."""
        estimate = self.planner.estimate
        with self._changed:
            ahead = self._queue.tokens_ahead(priority, tokens)
        return self._forecast.wait(estimate(ahead), self._clock()) + self._forecast.alone(estimate(tokens))

    def cancel(self, ticket: Ticket) -> None:
        """Drop what still waits of a request; what is on the device finishes but is not delivered."""
        with self._changed:
            ticket.cancelled = True
            for _ in {entry.clip or entry for entry in self._queue.remove(ticket)}:
                reason = "deadline" if ticket.is_expired(self._clock()) else "cancelled"
                self._monitor.item_dropped("queue", reason)

    def close(self) -> None:
        """Accept no more; what waits still runs."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    @property
    def is_empty(self) -> bool:
        """True if nothing waits."""
        return not self._queue

    @property
    def is_finished(self) -> bool:
        """True if it is closed and nothing waits."""
        with self._changed:
            return self._closed and not self._queue

    def wait(self, seconds: float) -> None:
        """Wait at most this long for items."""
        with self._changed:
            if seconds and not self._queue and not self._closed:
                self._changed.wait(seconds)

    def take(self) -> NextBatch:
        """Remove what runs next and what has expired."""
        with self._changed:
            window = self._queue.window(_WINDOW, self.planner.capacity)
            now = self._clock()
            expired = [entry for entry in window if entry.is_void(now)]
            waiting = [entry for entry in window if not entry.is_void(now)] if expired else window
            footprints = [entry.item.footprint for entry in waiting]
            plan = self.planner.plan(footprints, self._forecast.backlog(now))
            batch = plan.batches[0] if plan.batches else None
            entries = [waiting[item] for item in batch.items] if batch else []
            for entry in expired:
                self._queue.drop(entry)
            self._queue.take(entries)
            self._unanswered.update(expired, entries)
        return NextBatch(batch, footprints, entries, expired)

    def answered(self, entry: Entry) -> None:
        """An entry that was taken is answered."""
        self._unanswered.discard(entry)

    def abandon(self) -> list[Entry]:
        """Accept no more; returns all entries without an answer, waiting ones included."""
        with self._changed:
            self._closed = True
            waiting = self._queue.peek(len(self._queue))
            self._queue.take(waiting)
        return [*self._unanswered, *waiting]

    def waiting(self) -> Waiting:
        """What waits, at the pace of the last batches."""
        queue, tokens = self._queue, self._queue.tokens
        return Waiting(len(queue), queue.nbytes, tokens, self.planner.estimate(tokens) * self._forecast.pace)
