"""Load generation: worker threads send requests back to back or at a rate, and record each result."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vitwire import Client, Item, VitwireError

_STAMP_BYTES = 8
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pace:
    """How many requests to send, and how fast."""

    workers: int
    seconds: float
    requests: int | None = None
    """Stop after this many, if that comes before `seconds`."""
    rate: float | None = None
    """Requests per second, as a Poisson process; None sends the next one when a worker is free."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times in seconds since the load began."""

    due: float
    """Scheduled time. Latency counts from here, so waiting for a free worker counts as well."""
    done: float
    nbytes: int = 0
    """Bytes of its pixels."""
    tokens: int = 0
    paths: tuple[str, ...] = ()
    queued: tuple[float, ...] = ()
    error: str = ""
    """The status code's name; empty for a request that was answered."""

    @property
    def latency(self) -> float:
        """Seconds from its scheduled time to its last row."""
        return self.done - self.due


@dataclass(slots=True)
class Load:
    """Sends requests through a client at a given pace."""

    client: Client
    requests: Sequence[Sequence[Item]]
    """Sent in turn; each worker copies them."""
    pace: Pace
    fresh: bool = True
    """Whether to change pixels for each request, so that the cache never answers."""
    on_sample: Callable[[Sample], None] = lambda _: None
    """Called for each sample, in the worker's thread."""
    samples: list[Sample] = field(default_factory=list)
    interrupted: threading.Event = field(default_factory=threading.Event)
    """Set by Ctrl-C."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> float:
        """Run the load; returns its duration in seconds. An exception in a worker is raised once all have ended.

        Ctrl-C stops it early: requests in flight are dropped and the client is closed.
        """
        for items in self.requests:
            self.client.encode(items)  # warm up: connections, and one-time work in the server
        failures: list[Exception] = []
        began = time.perf_counter()
        due = enumerate(self._due())
        threads = [threading.Thread(target=self._work, args=(began, due, failures)) for _ in range(self.pace.workers)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self.interrupted.set()
            self.client.close()
            for thread in filter(threading.Thread.is_alive, threads):
                thread.join()
        seconds = time.perf_counter() - began
        if failures:
            raise failures[0]
        return seconds

    def _due(self) -> Iterator[float | None]:
        """Scheduled times in seconds since the start, None for at once; ends after `requests`."""
        rng = np.random.default_rng(0)
        moment, count = 0.0, 0
        while self.pace.requests is None or count < self.pace.requests:
            count += 1
            if self.pace.rate is not None:
                moment += rng.exponential(1 / self.pace.rate)
            yield moment if self.pace.rate is not None else None

    def _work(self, began: float, due: Iterator[tuple[int, float | None]], failures: list[Exception]) -> None:
        try:
            requests = [[_copied(item) for item in items] for items in self.requests]
            stamps = np.random.default_rng()
            while (upcoming := self._next(began, due)) is not None:
                number, moment = upcoming
                items = requests[number % len(requests)]
                if self.fresh:
                    _stamp(items, stamps)
                if self.interrupted.wait(began + moment - time.perf_counter()):
                    return
                sample = self._send(items, began, moment)
                if self.interrupted.is_set():
                    return
                with self._lock:
                    self.samples.append(sample)
                self.on_sample(sample)
        except Exception as error:  # noqa: BLE001  # raised again in the main thread
            if not self.interrupted.is_set():  # a closed client fails in many ways
                failures.append(error)

    def _next(self, began: float, due: Iterator[tuple[int, float | None]]) -> tuple[int, float] | None:
        """This worker's next request and its scheduled time; None when the load is over."""
        with self._lock:
            now = time.perf_counter() - began
            number, moment = next(due, (0, self.pace.seconds))
            moment = now if moment is None else moment
            return (number, moment) if max(moment, now) < self.pace.seconds else None

    def _send(self, items: Sequence[Item], began: float, due: float) -> Sample:
        try:
            embeddings = self.client.encode(items)
        except VitwireError as error:
            return Sample(due, time.perf_counter() - began, _nbytes(items), error=error.code)
        done = time.perf_counter() - began
        reports = [each.report for each in embeddings]
        return Sample(
            due,
            done,
            _nbytes(items),
            tokens=sum(each.shape[0] for each in embeddings),
            paths=tuple(each.path for each in reports),
            queued=tuple(each.queued for each in reports),
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Results of a load."""

    seconds: float
    samples: Sequence[Sample]

    @property
    def answered(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.error]

    @property
    def latencies(self) -> Array:
        """Latencies of answered requests in milliseconds, ascending."""
        return np.sort(np.array([sample.latency for sample in self.answered])) * 1e3

    def document(self) -> dict[str, object]:
        """All results, for JSON."""
        answered = self.answered
        items = sum(len(sample.paths) for sample in answered)
        tokens = sum(sample.tokens for sample in answered)
        nbytes = sum(sample.nbytes for sample in answered)
        return {
            "seconds": round(self.seconds, 3),
            "requests": len(self.samples),
            "errors": dict(Counter(sample.error for sample in self.samples if sample.error)),
            "items": items,
            "paths": dict(Counter(path for sample in answered for path in sample.paths)),
            "requests_per_second": round(len(answered) / self.seconds, 3),
            "items_per_second": round(items / self.seconds, 3),
            "tokens_per_second": round(tokens / self.seconds, 1),
            "megabytes_per_second": round(nbytes / self.seconds / 1e6, 3),
            "latency_ms": _percentiles(self.latencies),
            "queued_ms": _percentiles(np.array([each for sample in answered for each in sample.queued]) * 1e3),
        }


def _percentiles(values: Array) -> dict[str, float]:
    """Percentiles by name; empty without values."""
    if not len(values):
        return {}
    shares = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
    found = {"mean": values.mean()} | {name: np.percentile(values, share) for name, share in shares.items()}
    return {name: round(float(value), 3) for name, value in (found | {"max": values.max()}).items()}


def _nbytes(items: Sequence[Item]) -> int:
    """Bytes of the pixels of a request."""
    return sum(np.asarray(view).nbytes for item in items for view in (item.pixels, item.crops) if view is not None)


def _copied(item: Item) -> Item:
    """A copy of the item with writable pixels."""
    crops = None if item.crops is None else np.array(item.crops)
    return Item(np.array(item.pixels), item.grid, item.modality, item.content_id, item.keep_ratio, crops)


def _stamp(items: Sequence[Item], rng: np.random.Generator) -> None:
    """Overwrite the first pixels with random values."""
    for item in items:
        assert isinstance(item.pixels, np.ndarray)
        flat = item.pixels.reshape(-1)
        count = min(_STAMP_BYTES, flat.size)
        flat[:count] = rng.integers(0, 256, count, dtype=np.uint8)
