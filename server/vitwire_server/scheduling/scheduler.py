"""Decides when items run: decide, execute, commit, in one thread that owns the engine."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import Condition

from vitwire_server.core.errors import DeadlineExceeded, EncodeFailed, Unavailable
from vitwire_server.core.plans import Batch
from vitwire_server.core.reports import BatchReport, Encoded, ItemReport, Monitor, Outcome, Path
from vitwire_server.core.runner import Collected, Runner, Running, Timings
from vitwire_server.scheduling.planner import Planner
from vitwire_server.scheduling.queue import Queue
from vitwire_server.scheduling.tickets import Entry, Ticket

_log = logging.getLogger(__name__)
_WINDOW = 64
_HEARTBEAT_SECONDS = 0.5


class _Launched:
    """A batch on the device and the entries in it."""

    def __init__(self, entries: Sequence[Entry], batch: Batch, running: Running, started: float) -> None:
        self.entries = entries
        self.batch = batch
        self.running = running
        self.started = started


class Scheduler:
    """Hands what waits to the engine whenever it can take work; no timer while the device is idle.

    `submit`, `cancel` and `close` may be called from any thread; `run` is the engine's thread.
    """

    def __init__(
        self,
        runner: Runner,
        planner: Planner,
        monitor: Monitor,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._planner = planner
        self._monitor = monitor
        self._clock = clock
        self._queue = Queue()
        self._changed = Condition()
        self._closed = False
        self._planned: deque[tuple[Batch, list[Entry]]] = deque()
        self._launching: list[Entry] = []
        self._launched: deque[_Launched] = deque()

    # -- any thread ---------------------------------------------------------------------------

    def submit(self, entries: Iterable[Entry]) -> None:
        """Queue items. Raises Unavailable after `close`."""
        with self._changed:
            if self._closed:
                raise Unavailable("the server is shutting down")
            for entry in entries:
                self._queue.push(entry)
            self._queue_changed()
            self._changed.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Drop what still waits of a request; what is on the device finishes unseen."""
        with self._changed:
            ticket.cancelled = True
            for _ in self._queue.remove(ticket):
                self._monitor.item_dropped("queue", "cancelled")
            self._queue_changed()

    def close(self) -> None:
        """Let `run` return once nothing waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def now(self) -> float:
        """Seconds on the clock that deadlines are given in."""
        return self._clock()

    # -- the engine's thread ------------------------------------------------------------------

    def run(self) -> None:
        """Run batches until `close` was called and the queue is empty.

        Whatever the engine raises other than EncodeFailed ends the run: everything in flight is
        answered with EncodeFailed first, then the error goes on to the caller.
        """
        try:
            while not self._finished():
                self._step()
        except BaseException:
            self._abandon(EncodeFailed("the engine stopped"))
            raise

    def _step(self) -> None:
        launched = self._launched
        while len(launched) < self._runner.depth and (work := self._decide(wait=not launched)):
            if (started := self._execute(*work)) is not None:
                launched.append(started)
        if launched:
            self._commit(launched[0])
            launched.popleft()

    def _abandon(self, error: EncodeFailed) -> None:
        """Answer everything in flight with `error`, and take no more."""
        with self._changed:
            self._closed = True
            entries = self._queue.take(len(self._queue))
            self._queue_changed()
        entries += self._launching
        for done in self._launched:
            entries += done.entries
        for _, planned in self._planned:
            entries += planned
        for entry in entries:
            self._deliver(entry, error)

    def _finished(self) -> bool:
        with self._changed:
            return self._closed and not (self._queue or self._planned or self._launched)

    def _decide(self, *, wait: bool) -> tuple[Batch, list[Entry]] | None:
        """The next batch to run; None if nothing waits (and, with `wait`, after a heartbeat)."""
        self._monitor.heartbeat()
        if not self._planned:
            with self._changed:
                if wait and not self._queue and not self._closed:
                    self._changed.wait(_HEARTBEAT_SECONDS)
                entries = self._queue.take(_WINDOW)
                self._queue_changed()
            plan = self._planner.plan([entry.item.footprint for entry in entries])
            self._planned += [(batch, [entries[i] for i in batch.items]) for batch in plan.batches]
        return self._planned.popleft() if self._planned else None

    def _execute(self, batch: Batch, entries: list[Entry]) -> _Launched | None:
        """Start a batch, less the items that nobody waits for any more."""
        live = [entry for entry in entries if self._wanted(entry)]
        if not live:
            return None
        self._launching = live
        started = self._clock()
        for entry in live:
            self._monitor.item_waited(started - entry.arrived)
        try:
            running = self._runner.launch([entry.item for entry in live], batch.budget)
        except EncodeFailed as error:
            self._launching = []
            self._fail(live, batch, error)
            return None
        self._launching = []
        return _Launched(live, batch, running, started)

    def _wanted(self, entry: Entry) -> bool:
        if entry.ticket.cancelled:
            self._monitor.item_dropped("queue", "cancelled")
            return False
        if entry.ticket.deadline is not None and entry.ticket.deadline <= self._clock():
            self._monitor.item_dropped("queue", "deadline")
            self._deliver(entry, DeadlineExceeded("the deadline passed while the item was queued"))
            return False
        return True

    def _commit(self, done: _Launched) -> None:
        """Bring a batch's rows to the host and hand them out."""
        try:
            collected = done.running.collect()
        except EncodeFailed as error:
            self._fail(done.entries, done.batch, error)
            return
        encoded = self._clock() - done.started
        outcomes: list[Outcome] = []
        for entry, result in zip(done.entries, collected.results, strict=True):
            if isinstance(result, EncodeFailed):
                outcomes.append(result)
            else:
                outcomes.append(Encoded(result, self._report(entry, done, encoded)))
        self._hand_out(done.entries, done.batch, outcomes, collected)

    def _fail(self, entries: Sequence[Entry], batch: Batch, error: EncodeFailed) -> None:
        _log.error("a batch of %d items failed: %s", len(entries), error)
        nothing = Collected((), Timings(0.0, 0.0, 0.0))
        self._hand_out(entries, batch, [error] * len(entries), nothing)

    def _hand_out(
        self, entries: Sequence[Entry], batch: Batch, outcomes: Sequence[Outcome], collected: Collected
    ) -> None:
        self._monitor.batch_ran(
            BatchReport(
                items=[(entry.item.modality, outcome) for entry, outcome in zip(entries, outcomes, strict=True)],
                requests=len({entry.ticket.number for entry in entries}),
                budget=batch.budget,
                fallback=batch.fallback,
                tokens=sum(entry.item.footprint.tokens for entry in entries),
                timings=collected.timings,
            )
        )
        for entry, outcome in zip(entries, outcomes, strict=True):
            self._deliver(entry, outcome)

    def _deliver(self, entry: Entry, outcome: Outcome) -> None:
        if entry.ticket.cancelled:
            self._monitor.item_dropped("encoded", "cancelled")
        else:
            entry.ticket.deliver(entry.index, outcome)

    @staticmethod
    def _report(entry: Entry, done: _Launched, encoded: float) -> ItemReport:
        budget = done.batch.budget
        return ItemReport(
            path=Path.EAGER if budget is None else Path.GRAPH,
            fallback=done.batch.fallback,
            budget_tokens=0 if budget is None else budget.tokens,
            tokens=entry.item.footprint.tokens,
            queued=done.started - entry.arrived,
            encoded=encoded,
        )

    def _queue_changed(self) -> None:
        self._monitor.queue_changed(len(self._queue), self._queue.nbytes)
