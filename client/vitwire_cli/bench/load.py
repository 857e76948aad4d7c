"""Load generation: threads send requests back to back, or when they are due, and record each result."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from vitwire import Client, Embedding, Item, VitwireError
from vitwire.items import pixel_bytes
from vitwire_cli.bench.workload import Shape, Workload

NOT_SENT = "NOT_SENT"
"""Error of a request that was due, but for which no thread was free until after the end."""
_STAMP_BYTES = 8
_GRACE_SECONDS = 1.0
"""Seconds after the end in which requests that were due before it are still sent."""
_BEHIND_SECONDS = 5.0
"""Seconds after the end in which requests that were due before it are still counted."""
_MAX_BACKLOG = 500_000
"""Requests that may be due and not yet answered; each takes about 1 KB."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times in seconds since the load began."""

    due: float
    """Scheduled time. Latency counts from here, so all waiting in the generator counts as well."""
    done: float
    nbytes: int = 0
    """Bytes of its pixels."""
    tokens: int = 0
    paths: tuple[str, ...] = ()
    queued: tuple[float, ...] = ()
    error: str = ""
    """The status code's name, or NOT_SENT; empty for a request that was answered."""
    late: float = 0.0
    """Seconds by which the generator itself was late."""
    waited: float = 0.0
    """Seconds for which it then waited until fewer than the maximum were in flight, and for its pixels."""
    first_rows: float = 0.0
    """Seconds from its scheduled time to its first rows."""

    @property
    def latency(self) -> float:
        """Seconds from its scheduled time to its last row."""
        return self.done - self.due


@dataclass(frozen=True, slots=True)
class Pace:
    """The number of requests to send, and their times."""

    concurrency: int
    """Maximum requests in flight; a thread each, started when needed."""
    seconds: float
    requests: int | None = None
    """Stop after this many, if that comes before `seconds`."""
    due: Iterator[float] | None = None
    """Ascending times in seconds since the start; None sends the next request when one was answered."""


@dataclass(slots=True)
class Load:
    """Sends requests through a client at a given pace."""

    client: Client
    workload: Workload
    pace: Pace
    fresh: bool = True
    """Whether to change pixels for each request, so that the cache never answers."""
    on_sample: Callable[[Sample], None] = lambda _: None
    """Called for each sample, one at a time."""
    samples: list[Sample] = field(default_factory=list)
    in_flight_max: int = 0
    cut: bool = False
    """Whether the rate was too high for the generator, so that not all requests that were due are counted."""
    cpu_seconds: float = 0.0
    """Processor time of this process while the load ran."""
    interrupted: threading.Event = field(default_factory=threading.Event)
    """Set by Ctrl-C."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _failures: list[Exception] = field(default_factory=list)
    _in_flight: int = 0
    _began: float = 0.0
    _ended: float = float("inf")
    """When the last request was due, once that is known."""

    def warm_up(self) -> list[Shape]:
        """Open connections, and let the server do work that comes once; returns what the model makes of each size."""
        seen: dict[int, Embedding] = {}
        for items in self.workload.warmup:
            seen |= zip(map(id, items), self.client.encode(items), strict=True)
        found = [(size, seen[id(item)]) for size, item in self.workload.sizes.items() if id(item) in seen]
        return [Shape(str(size), rows.grid, rows.shape[0]) for size, rows in found]

    def run(self) -> float:
        """Run the load; returns its duration in seconds. An exception in a thread is raised once all have ended.

        Ctrl-C stops it early: requests in flight are dropped and the client is closed.
        """
        self._began, cpu = time.perf_counter(), time.process_time()
        pool = ThreadPoolExecutor(self.pace.concurrency, "vitwire-bench")
        try:
            if self.pace.due is None:
                self._start_closed(pool)
            else:
                self._await_dispatch(pool, self.pace.due)
            pool.shutdown()
        except KeyboardInterrupt:
            self.interrupted.set()
            self.client.close()
            pool.shutdown(cancel_futures=True)
        seconds = self._now()
        self.cpu_seconds = time.process_time() - cpu
        if self._failures:
            raise self._failures[0]
        return seconds

    def _start_closed(self, pool: ThreadPoolExecutor) -> None:
        numbers = iter(range(self.pace.requests if self.pace.requests is not None else 1 << 62))
        for _ in range(min(self.pace.concurrency, self.pace.requests or self.pace.concurrency)):
            pool.submit(self._guarded, lambda: self._back_to_back(numbers))

    def _back_to_back(self, numbers: Iterator[int]) -> None:
        while (now := self._now()) < self.pace.seconds and not (self.interrupted.is_set() or self._failures):
            with self._lock:
                number = next(numbers, None)
            if number is None:
                return
            self._send(number, now, 0.0)

    def _await_dispatch(self, pool: ThreadPoolExecutor, due: Iterator[float]) -> None:
        """Dispatch in a thread of its own, since Ctrl-C raised within `submit` may leave a lock of the pool held."""
        with ThreadPoolExecutor(1, "vitwire-bench-due") as timer:
            try:
                timer.submit(self._guarded, lambda: self._dispatch(pool, due)).result()
            except KeyboardInterrupt:
                self.interrupted.set()  # ends the dispatch
                raise

    def _dispatch(self, pool: ThreadPoolExecutor, due: Iterator[float]) -> None:
        """Hand each request to a thread when it is due, whatever became of those before it."""
        for number, moment in enumerate(due):
            if number == self.pace.requests or moment >= self.pace.seconds or self._failures:
                break
            if (early := moment - self._now()) > 0:
                self.interrupted.wait(early)
            if self.interrupted.is_set():
                break
            late = self._now() - moment
            backlog = number - len(self.samples)
            if moment + late > self.pace.seconds + _BEHIND_SECONDS or backlog > _MAX_BACKLOG:
                self.cut = True
                break
            pool.submit(self._guarded, lambda args=(number, moment, late): self._send(*args))  # type: ignore[misc]
        self._ended = self._now()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # raised again in the main thread
            if not self.interrupted.is_set():  # a closed client fails in many ways
                self._failures.append(error)

    def _send(self, number: int, due: float, late: float) -> None:
        if self.interrupted.is_set():
            return
        items = self.workload[number]
        if self._now() > self._ended + _GRACE_SECONDS:
            self._record(Sample(due, self._now(), error=NOT_SENT, late=late))
            return
        if self.fresh:
            items = [_changed(item) for item in items]
        with self._lock:
            self._in_flight += 1
            self.in_flight_max = max(self.in_flight_max, self._in_flight)
        waited = self._now() - due - late
        try:
            sample = self._encoded(items, due, late, waited)
        finally:
            with self._lock:
                self._in_flight -= 1
        if not self.interrupted.is_set():
            self._record(sample)

    def _encoded(self, items: Sequence[Item], due: float, late: float, waited: float) -> Sample:
        nbytes, first, answers = sum(map(pixel_bytes, items)), 0.0, dict[int, Embedding]()
        try:
            for answer in self.client.iter_encode(items, groups=items[0].encoded is not None):
                first = first or self._now()
                answers |= [answer]
        except VitwireError as error:
            return Sample(due, self._now(), nbytes, error=error.code, late=late, waited=waited)
        done = self._now()
        reports, model = [each.report for each in answers.values()], self.client.model()
        return Sample(
            due,
            done,
            nbytes,
            tokens=sum(model.tokens(each.grid, each.shape[0]) for each in answers.values()),
            paths=tuple(each.path for each in reports),
            queued=tuple(each.queued for each in reports),
            late=late,
            waited=waited,
            first_rows=first - due,
        )

    def _record(self, sample: Sample) -> None:
        with self._lock:
            self.samples.append(sample)
            self.on_sample(sample)

    def _now(self) -> float:
        """Seconds since the load began."""
        return time.perf_counter() - self._began


def _changed(item: Item) -> Item:
    """A copy of the item whose first pixels are random, or a file with random bytes behind its end."""
    if item.encoded is not None:
        return replace(item, encoded=bytes(item.encoded) + os.urandom(_STAMP_BYTES))
    pixels = np.array(item.pixels)
    flat = pixels.reshape(-1).view(np.uint8)
    count = min(_STAMP_BYTES, flat.size)
    flat[:count] = np.frombuffer(os.urandom(count), np.uint8)
    return replace(item, pixels=pixels)
