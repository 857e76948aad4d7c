"""Decides when items run: decide, execute, commit, in one thread that owns the engine."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Condition

from vitwire_server.core.errors import DeadlineExceeded, EncodeFailed, EncoderError, Unavailable
from vitwire_server.core.plans import Batch, Fallback
from vitwire_server.core.reports import BatchReport, Encoded, ItemReport, Monitor, Outcome, Path
from vitwire_server.core.runner import Collected, Runner, Running, Timings
from vitwire_server.scheduling.canary import Canary
from vitwire_server.scheduling.failures import log_failures
from vitwire_server.scheduling.forecast import Forecast
from vitwire_server.scheduling.planner import Planner
from vitwire_server.scheduling.queue import Queue
from vitwire_server.scheduling.tickets import Entry, Priority, Ticket

_WINDOW = 64
_HEARTBEAT_SECONDS = 0.5
_LENIENCE = 10.0
"""How many times what was predicted a batch may take before that counts as silence."""

_PAIRS_ON_HOST, _PAIRS_ON_DEVICE = 2e5, 1e8
"""Pairs of patches a second that attention of a large tower gets through on the slowest machine thought of."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A batch on the device and the entries in it."""

    entries: Sequence[Entry]
    batch: Batch
    running: Running
    started: float
    predicted: float
    attention: float
    """Seconds that attention over long segments may add, which predictions leave out."""


class Scheduler:
    """Hands what waits to the engine whenever it can take work; no timer while the device is idle.

    Each time it plans over what is next in turn and runs the first batch of the plan, so that what
    came in the meantime takes its turn. `submit`, `check_deadline`, `cancel` and `close` may be called
    from any thread; `run` is the engine's thread.
    """

    def __init__(
        self,
        runner: Runner,
        planner: Planner,
        monitor: Monitor,
        *,
        canary: Canary | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._canary = canary
        self._forecast = Forecast()
        self._runner = runner
        self._planner = planner
        self._monitor = monitor
        self._clock = clock
        self._queue = Queue()
        self._changed = Condition()
        self._closed = False
        self._launched: deque[_Launched] = deque()
        self._unanswered: dict[tuple[int, int], Entry] = {}
        """Entries that left the queue and were not delivered yet, by ticket and index."""
        self.last_beat = clock()
        """When the engine's thread last came by."""
        self.last_launch = self.last_beat
        """When a batch was last started."""
        self._checked = self.last_beat
        """When the canary last sang."""
        self._allowance = 0.0
        """Seconds that the engine's thread may stay away for the batches under way."""

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

    def check_deadline(self, ticket: Ticket, tokens: int, items: int = 1) -> None:
        """Raises DeadlineExceeded if items of `tokens` tokens cannot be done by the ticket's deadline.

        Counts what goes before them by their share, what is under way, and their own time.
        """
        if ticket.deadline is None:
            return
        left = ticket.deadline - self._clock()
        needed = self._foreseen(ticket.priority, tokens)
        if needed <= left:
            return
        for _ in range(items):
            self._monitor.item_dropped("admission", "deadline")
        raise DeadlineExceeded(f"about {needed:.3g} s are needed, {max(0.0, left):.3g} s are left until the deadline")

    def _foreseen(self, priority: Priority, tokens: int) -> float:
        """Seconds until a new request of so many tokens would be done."""
        estimate = self._planner.estimate
        with self._changed:
            ahead = self._queue.tokens_ahead(priority, tokens)
        return self._forecast.wait(estimate(ahead), self._clock()) + self._forecast.alone(estimate(tokens))

    def silence(self) -> float:
        """Seconds that the engine's thread stays away beyond what its work explains."""
        return max(0.0, self._clock() - self.last_beat - self._allowance)

    @property
    def ailment(self) -> str:
        """What the canary found to be wrong; empty if nothing."""
        return self._canary.ailment if self._canary else ""

    def cancel(self, ticket: Ticket) -> None:
        """Drop what still waits of a request; what is on the device finishes unseen."""
        with self._changed:
            ticket.cancelled = True
            reason = "deadline" if self._expired(ticket) else "cancelled"
            for _ in self._queue.remove(ticket):
                self._monitor.item_dropped("queue", reason)
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

        Whatever is raised ends the run, a lost device above all: everything in flight is answered
        with EncodeFailed first, then the error goes on to the caller.
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
            launched.append(self._execute(*work))
        if launched:
            self._commit(launched.popleft())
        else:
            self._forecast.idle()
            self._check_device()

    def _check_device(self) -> None:
        """Let the canary sing if nothing ran for long enough and nothing waits."""
        canary, start = self._canary, self._clock()
        if canary is None or not canary.is_due(start - max(self.last_launch, self._checked)) or self._queue:
            return
        predicted = self._planner.seconds(canary.batch, [canary.item.footprint])
        self._allow(predicted)
        passed = canary.sing(self._runner)
        self._checked = self._clock()
        self._forecast.ran(predicted, start, self._checked)
        self._monitor.canary_ran(passed=passed)

    def _allow(self, predicted: float, attention: float = 0.0) -> None:
        """The thread may now stay away for as long as the work under way explains."""
        predicted += sum(batch.predicted for batch in self._launched)
        attention += sum(batch.attention for batch in self._launched)
        self._allowance = _LENIENCE * predicted * max(1.0, self._forecast.pace) + attention
        self.last_beat = self._clock()

    def _finished(self) -> bool:
        with self._changed:
            return self._closed and not (self._queue or self._launched)

    def _abandon(self, error: EncodeFailed) -> None:
        """Answer everything in flight with `error`, and take no more."""
        with self._changed:
            self._closed = True
            waiting = self._queue.peek(len(self._queue))
            self._queue.take(waiting)
            self._queue_changed()
        for entry in [*self._unanswered.values(), *waiting]:
            self._deliver(entry, error)

    def _decide(self, *, wait: bool) -> tuple[Batch, list[Entry]] | None:
        """The next batch to run; None if nothing waits (and, with `wait`, after a heartbeat)."""
        self._allow(0.0)
        self._monitor.heartbeat()
        with self._changed:
            if wait and not self._queue and not self._closed:
                self._changed.wait(_HEARTBEAT_SECONDS)
            window = self._queue.window(_WINDOW, self._planner.capacity)
            expired = [entry for entry in window if self._expired(entry.ticket)]
            waiting = [entry for entry in window if not self._expired(entry.ticket)] if expired else window
            plan = self._planner.plan([entry.item.footprint for entry in waiting])
            first = plan.batches[0] if plan.batches else None
            entries = [waiting[item] for item in first.items] if first else []
            self._take(expired, entries)
        for entry in expired:
            self._monitor.item_dropped("queue", "deadline")
            self._deliver(entry, DeadlineExceeded("the deadline passed while the item was queued"))
        return (first, entries) if first else None

    def _take(self, expired: Sequence[Entry], entries: Sequence[Entry]) -> None:
        for entry in expired:
            self._queue.drop(entry)
        self._queue.take(entries)
        self._unanswered |= {(entry.ticket.number, entry.index): entry for entry in (*expired, *entries)}
        if expired or entries:
            self._queue_changed()

    def _execute(self, batch: Batch, entries: list[Entry]) -> _Launched:
        self.last_launch = started = self._clock()
        for entry in entries:
            self._monitor.item_waited(started - entry.arrived)
        predicted, attention = self._predicted(batch, entries), self._attention(entries)
        self._allow(predicted, attention)
        self._forecast.launched(predicted, started)
        running = self._runner.launch([entry.item for entry in entries], batch.budget)
        return _Launched(entries, batch, running, started, predicted, attention)

    def _attention(self, entries: Sequence[Entry]) -> float:
        pairs = sum(entry.item.footprint.patches * entry.item.footprint.longest for entry in entries)
        return pairs / (_PAIRS_ON_HOST if self._runner.depth == 1 else _PAIRS_ON_DEVICE)

    def _predicted(self, batch: Batch, entries: Sequence[Entry]) -> float:
        own = Batch(tuple(range(len(entries))), batch.budget, batch.fallback)
        return self._planner.seconds(own, [entry.item.footprint for entry in entries])

    def _commit(self, done: _Launched) -> None:
        """Bring a batch's rows to the host, count it and hand the rows out."""
        self._allow(done.predicted, done.attention)
        collected = done.running.collect()
        if collected.apart:
            done = replace(done, batch=Batch(done.batch.items, None, Fallback.OUT_OF_MEMORY))
        now = self._clock()
        encoded = now - done.started
        self._forecast.ran(done.predicted, done.started, now)
        outcomes: list[Outcome] = [
            result
            if isinstance(result, EncoderError)
            else Encoded(result, self._report(entry, done, encoded, collected.timings))
            for entry, result in zip(done.entries, collected.results, strict=True)
        ]
        log_failures(done.entries, outcomes)
        self._monitor.batch_ran(self._batch_report(done, outcomes, collected))
        for entry, outcome in zip(done.entries, outcomes, strict=True):
            self._deliver(entry, outcome)

    def _batch_report(self, done: _Launched, outcomes: Sequence[Outcome], collected: Collected) -> BatchReport:
        return BatchReport(
            items=[(entry.item.modality, outcome) for entry, outcome in zip(done.entries, outcomes, strict=True)],
            requests=len({entry.ticket.number for entry in done.entries}),
            budget=done.batch.budget,
            fallback=done.batch.fallback,
            tokens=sum(entry.item.footprint.tokens for entry in done.entries),
            timings=collected.timings,
        )

    def _deliver(self, entry: Entry, outcome: Outcome) -> None:
        self._unanswered.pop((entry.ticket.number, entry.index), None)
        if entry.ticket.cancelled:
            self._monitor.item_dropped("encoded", "cancelled")
        else:
            entry.ticket.deliver(entry.index, outcome)

    @staticmethod
    def _report(entry: Entry, done: _Launched, encoded: float, timings: Timings | None) -> ItemReport:
        budget = done.batch.budget
        return ItemReport(
            path=Path.EAGER if budget is None else Path.GRAPH,
            fallback=done.batch.fallback,
            budget_tokens=0 if budget is None else budget.tokens,
            tokens=entry.item.rows,
            queued=done.started - entry.arrived,
            encoded=encoded,
            started=done.started,
            timings=timings,
        )

    def _expired(self, ticket: Ticket) -> bool:
        return ticket.deadline is not None and ticket.deadline <= self._clock()

    def _queue_changed(self) -> None:
        self._monitor.queue_changed(len(self._queue), self._queue.nbytes)
