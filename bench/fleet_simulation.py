"""A fleet of encoders behind routers, simulated: queues, batches, caches, routing, crashes. See docs/scale.md.

The costs of a replica are measured (docs/performance.md). `bench/fleet_study.py` runs the experiments.
"""

import zlib
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
import simpy

# Measured for Qwen3-VL-8B on an H200; docs/scale.md derives each from docs/performance.md.
BATCH_SECONDS = 1.3e-3
TOKEN_SECONDS = 8.0e-6
TOKEN_PAIR_SECONDS = 5.9e-9
HOST_SECONDS = 1 / 2195
OVERHEAD_SECONDS = 4.8e-3
BATCH_TOKENS = 4096
ROW_BYTES = 32_768
READY_SECONDS = 16.0

QUEUE_ITEMS = 4096
RETRIES = 3
BACKOFF_SECONDS = 0.05
ROUTERS = 50
POLICIES = ("round_robin", "least_request", "hash", "bounded_hash")
_BOUND = 1.25
_RING_POINTS = 40


def device_seconds(tokens: Sequence[int]) -> float:
    """Time of the device for one batch."""
    return BATCH_SECONDS + sum(TOKEN_SECONDS * each + TOKEN_PAIR_SECONDS * each * each for each in tokens)


@dataclass(slots=True)
class Request:
    """One image."""

    due: float
    tokens: int
    content: int
    router: int
    attempts: int = 0


@dataclass(slots=True)
class Tally:
    """What came of the requests that were due after the start of the measurement."""

    start: float
    latencies: list[float] = field(default_factory=list)
    hits: int = 0
    retries: int = 0
    failed: int = 0

    def row(self, seconds: float) -> dict[str, float]:
        """For a table."""
        done = len(self.latencies)
        p50, p99 = np.percentile(self.latencies, (50, 99)) * 1e3 if done else (0.0, 0.0)
        total = max(1, done + self.failed)
        return {
            "images_per_second": round(done / seconds),
            "p50_ms": round(float(p50), 1),
            "p99_ms": round(float(p99), 1),
            "hits": round(self.hits / total, 4),
            "retries": round(self.retries / total, 4),
            "failed": round(self.failed / total, 4),
        }


class Replica:
    """A queue, a device that takes batches from it, a cache, and a host that hands out one answer at a time."""

    def __init__(self, fleet: "Fleet", name: int, *, ready: float = 0.0) -> None:
        self.fleet, self.name = fleet, name
        self.queue: deque[Request] = deque()
        self.cache: OrderedDict[int, int] = OrderedDict()
        self.cached_tokens = 0
        self.busy_seconds = self.host_free = 0.0
        self.alive = False
        self.epoch = 0
        fleet.env.process(self._start(ready))

    def _start(self, delay: float) -> Generator[simpy.Event, None, None]:
        if delay:
            yield self.fleet.env.timeout(delay)
        self.alive, self.wake = True, self.fleet.env.event()
        self.fleet.changed()
        self.fleet.env.process(self._encode(self.epoch))

    def remember(self, content: int, tokens: int) -> None:
        """Store an embedding; the least recently used ones make room."""
        if content in self.cache or tokens > self.fleet.cache_tokens:
            return
        self.cache[content] = tokens
        self.cached_tokens += tokens
        while self.cached_tokens > self.fleet.cache_tokens:
            self.cached_tokens -= self.cache.popitem(last=False)[1]

    def submit(self, request: Request) -> None:
        """Answer from the cache, queue, or refuse."""
        if request.content in self.cache:
            self.cache.move_to_end(request.content)
            self.answer(request, hit=True)
        elif len(self.queue) >= QUEUE_ITEMS:
            self.fleet.retry(request, self)
        else:
            self.queue.append(request)
            if not self.wake.triggered:
                self.wake.succeed()

    def _encode(self, epoch: int) -> Generator[simpy.Event, None, None]:
        while self.alive and self.epoch == epoch:
            if not self.queue:
                self.wake = self.fleet.env.event()
                yield self.wake
                continue
            batch = [self.queue.popleft()]
            tokens = batch[0].tokens
            while self.queue and tokens + self.queue[0].tokens <= BATCH_TOKENS:
                tokens += self.queue[0].tokens
                batch.append(self.queue.popleft())
            seconds = device_seconds([each.tokens for each in batch])
            yield self.fleet.env.timeout(seconds)
            if self.epoch != epoch:  # the process died under the batch
                for request in batch:
                    self.fleet.retry(request, self)
                return
            self.busy_seconds += seconds
            for request in batch:
                self.remember(request.content, request.tokens)
                self.answer(request, hit=False)

    def answer(self, request: Request, *, hit: bool) -> None:
        """Hand the rows out, one item after the other."""
        now = self.fleet.env.now
        self.host_free = max(now, self.host_free) + HOST_SECONDS
        done = self.fleet.env.timeout(self.host_free - now + OVERHEAD_SECONDS)
        done.callbacks.append(lambda _: self.fleet.done(request, self, hit))

    def crash(self, restart: float) -> None:
        """Lose queue, batch and cache; a new process is ready after `restart`."""
        self.alive, self.epoch = False, self.epoch + 1
        waiting, self.queue = list(self.queue), deque()
        self.cache.clear()
        self.cached_tokens = 0
        self.fleet.changed()
        if not self.wake.triggered:
            self.wake.succeed()
        for request in waiting:
            self.fleet.retry(request, self)
        self.fleet.env.process(self._start(restart))


class Fleet:
    """Replicas, the routers in front of them, and what came of the requests."""

    def __init__(self, count: int, policy: str, cache_bytes: float, tally: Tally, seed: int = 0) -> None:
        self.env = simpy.Environment()
        self.policy, self.tally = policy, tally
        self.cache_tokens = int(cache_bytes // ROW_BYTES)
        self.rng = np.random.default_rng(seed)
        self.sent = np.zeros((ROUTERS, 16 * count), np.int32)
        """Requests in flight by router and replica: a router knows its own only."""
        self.open = [0] * ROUTERS
        """Their sums."""
        self.turns = self.rng.integers(0, count, ROUTERS)
        self.replicas: list[Replica] = []
        self.live: list[Replica] = []
        self._ring: list[tuple[int, Replica]] = []
        self._hashes: list[int] = []
        self.replicas += [Replica(self, number) for number in range(count)]
        self.env.run(until=1e-9)

    def changed(self) -> None:
        """Routers see at once which replicas are there: a crash closes its connections."""
        self.live = [each for each in self.replicas if each.alive]
        self._ring, self._hashes = [], []

    def choose(self, request: Request) -> Replica:
        """The replica for a request, by the policy."""
        live = self.live
        if self.policy == "round_robin":
            self.turns[request.router] += 1
            return live[int(self.turns[request.router]) % len(live)]
        if self.policy == "least_request" or request.attempts:
            first, second = (live[int(self.rng.random() * len(live))] for _ in range(2))
            sent = self.sent[request.router]
            return first if sent[first.name] <= sent[second.name] else second
        return self.on_ring(request)

    def on_ring(self, request: Request) -> Replica:
        """The replica that owns the content of a request; with a bound, the next one that is not overloaded."""
        if not self._ring:
            points = [
                (_hash(b"%d/%d" % (each.name, point)), each) for each in self.live for point in range(_RING_POINTS)
            ]
            self._ring = sorted(points, key=lambda entry: entry[0])
            self._hashes = [number for number, _ in self._ring]
        place = bisect_left(self._hashes, _hash(b"%d" % request.content)) % len(self._ring)
        found = self._ring[place][1]
        if self.policy == "hash":
            return found
        sent = self.sent[request.router]
        limit = _BOUND * (self.open[request.router] + 1) / len(self.live)
        while sent[found.name] > limit:
            place = (place + 1) % len(self._ring)
            found = self._ring[place][1]
        return found

    def submit(self, request: Request) -> None:
        """Route a request; without replicas it fails."""
        if not self.live:
            self._fail(request)
            return
        replica = self.choose(request)
        self.sent[request.router, replica.name] += 1
        self.open[request.router] += 1
        replica.submit(request)

    def retry(self, request: Request, replica: Replica) -> None:
        """After a refusal or a crash: again after a pause, up to a number of times."""
        self.sent[request.router, replica.name] -= 1
        self.open[request.router] -= 1
        if request.attempts >= RETRIES:
            self._fail(request)
            return
        request.attempts += 1
        self.tally.retries += request.due >= self.tally.start
        pause = self.env.timeout(BACKOFF_SECONDS * 2 ** (request.attempts - 1) * float(self.rng.uniform(0.5, 1)))
        pause.callbacks.append(lambda _: self.submit(request))

    def done(self, request: Request, replica: Replica, hit: bool) -> None:
        """A request was answered."""
        self.sent[request.router, replica.name] -= 1
        self.open[request.router] -= 1
        if request.due >= self.tally.start:
            self.tally.latencies.append(self.env.now - request.due)
            self.tally.hits += hit

    def _fail(self, request: Request) -> None:
        self.tally.failed += request.due >= self.tally.start


def _hash(key: bytes) -> int:
    """Spread evenly over 32 bits: CRC alone keeps neighbours together."""
    return zlib.crc32(zlib.adler32(key).to_bytes(4, "big") + key[::-1] + b"vitwire") * 2654435761 % (1 << 32)
