"""A fleet of encoders behind routers, simulated: queues, batches, caches, retries, crashes. See docs/scale.md.

The costs of a replica are measured (docs/performance/service.md). `bench/simulation/study.py` runs the experiments.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import simpy
from bench.simulation.routing import Routing
from bench.simulation.tally import Tally

_RETRIES = 8
_FIRST_BACKOFF, _MAX_BACKOFF = 0.1, 0.4
"""As the client's."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of Qwen3-VL-8B on an H200; docs/scale.md derives each value from docs/performance/service.md."""

    batch_seconds: float = 1.3e-3
    token_seconds: float = 8.0e-6
    token_pair_seconds: float = 5.9e-9
    batch_tokens: int = 4096
    batch_items: int = 64
    answer_seconds: float = 1 / 2195
    """Shortest time between two answers."""
    send_bytes_per_second: float = 3.5e9
    other_seconds: float = 4.4e-3
    """Of each request, without holding up others."""
    row_bytes: int = 32_768
    pixel_bytes: int = 3072
    """Both per token."""
    admitted_items: int = 4096
    admitted_bytes: int = 4 << 30
    ready_seconds: float = 16.0
    """From the start of a process until it serves."""

    def device_seconds(self, tokens: Sequence[int]) -> float:
        """Time of the device for one batch."""
        return self.batch_seconds + sum(self.token_seconds * n + self.token_pair_seconds * n * n for n in tokens)

    def send_seconds(self, tokens: int) -> float:
        """Time for which the rows of one image hold up those of others."""
        return max(self.answer_seconds, tokens * self.row_bytes / self.send_bytes_per_second)

    def capacity(self, tokens: Sequence[int]) -> float:
        """Images per second of one replica without cache hits, in full batches."""
        items = sum(self.device_seconds([n]) - self.batch_seconds for n in tokens) / len(tokens)
        return 1 / (items + self.batch_seconds * sum(tokens) / len(tokens) / self.batch_tokens)


@dataclass(slots=True, eq=False)
class Request:
    """One image."""

    due: float
    tokens: int
    content: int
    router: int
    attempts: int = 0


class Replica:
    """A queue, a device that takes batches from it, a cache, and a host that sends one answer after the other."""

    def __init__(self, fleet: "Fleet", name: int, ready_after: float) -> None:
        self.fleet, self.name = fleet, name
        self.queue: deque[Request] = deque()
        self.cache: OrderedDict[int, int] = OrderedDict()
        self.cached_tokens = 0
        self.admitted: dict[Request, None] = {}
        """Requests in the queue, on the device and being sent, in order of arrival."""
        self.admitted_tokens = 0
        self.computed_seconds = self.sending_until = 0.0
        self.computing_since: float | None = None
        self.epoch = 0
        """Number of crashes."""
        self._wake: simpy.Event | None = None
        fleet.env.process(self._start(ready_after))

    def _start(self, seconds: float) -> Generator[simpy.Event, None, None]:
        if seconds:
            yield self.fleet.env.timeout(seconds)
        self.fleet.ready(self)
        yield from self._encode(self.epoch)

    @property
    def busy_seconds(self) -> float:
        """Time that the device has computed, for the batch on it as well; not for those that a crash ended."""
        running = 0.0 if self.computing_since is None else self.fleet.env.now - self.computing_since
        return self.computed_seconds + running

    def remember(self, content: int, tokens: int) -> None:
        """Store an embedding; the least recently used ones make room."""
        if content in self.cache:
            self.cache.move_to_end(content)
            return
        if tokens > self.fleet.cache_tokens:
            return
        self.cache[content] = tokens
        self.cached_tokens += tokens
        while self.cached_tokens > self.fleet.cache_tokens:
            self.cached_tokens -= self.cache.popitem(last=False)[1]

    def submit(self, request: Request) -> None:
        """Answer from the cache, queue, or refuse."""
        costs = self.fleet.costs
        tokens = self.admitted_tokens + request.tokens
        full = tokens * (costs.row_bytes + costs.pixel_bytes) > costs.admitted_bytes
        if len(self.admitted) >= costs.admitted_items or (full and self.admitted):
            self.fleet.lost(request, self)
            return
        self.admitted[request] = None
        self.admitted_tokens = tokens
        if request.content in self.cache:
            self.cache.move_to_end(request.content)
            self._send(request, hit=True)
            return
        self.queue.append(request)
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None

    def _encode(self, epoch: int) -> Generator[simpy.Event, None, None]:
        while self.epoch == epoch:
            if not self.queue:
                self._wake = self.fleet.env.event()
                yield self._wake
                continue
            batch = self._take()
            seconds = self.fleet.costs.device_seconds([each.tokens for each in batch])
            self.computing_since = self.fleet.env.now
            yield self.fleet.env.timeout(seconds)
            if self.epoch != epoch:
                return
            self.computed_seconds, self.computing_since = self.computed_seconds + seconds, None
            for request in batch:
                self.remember(request.content, request.tokens)
                self._send(request, hit=False)

    def _take(self) -> list[Request]:
        """As many requests as fit one batch, in order of arrival; at least one."""
        batch = [self.queue.popleft()]
        room = self.fleet.costs.batch_tokens - batch[0].tokens
        while self.queue and self.queue[0].tokens <= room and len(batch) < self.fleet.costs.batch_items:
            room -= self.queue[0].tokens
            batch.append(self.queue.popleft())
        return batch

    def _send(self, request: Request, *, hit: bool) -> None:
        now, epoch = self.fleet.env.now, self.epoch
        self.sending_until = max(now, self.sending_until) + self.fleet.costs.send_seconds(request.tokens)
        sent = self.fleet.env.timeout(self.sending_until - now + self.fleet.costs.other_seconds)
        sent.callbacks.append(lambda _: self._sent(request, hit, epoch))

    def _sent(self, request: Request, hit: bool, epoch: int) -> None:
        if epoch == self.epoch:  # else the crash has taken it
            del self.admitted[request]
            self.admitted_tokens -= request.tokens
            self.fleet.answered(request, self, hit)

    def crash(self, restart_after: float) -> None:
        """Lose the requests inside and the cache; a new process is ready after `restart_after` seconds."""
        self.epoch += 1
        self.fleet.gone(self)
        lost, self.admitted = list(self.admitted), {}
        self.admitted_tokens = self.cached_tokens = 0
        self.queue.clear()
        self.cache.clear()
        self.sending_until, self.computing_since = 0.0, None
        self._wake_up()
        for request in lost:
            self.fleet.lost(request, self)
        self.fleet.env.process(self._start(restart_after))


class Fleet:
    """Replicas, the routers in front of them, and what came of the requests."""

    def __init__(
        self,
        count: int,
        policy: str,
        *,
        costs: Costs | None = None,
        cache_bytes: float = 0.0,
        routers: int = 50,
        seed: int = 0,
    ) -> None:
        self.env = simpy.Environment()
        self.costs = costs or Costs()
        self.cache_tokens = int(cache_bytes // self.costs.row_bytes)
        self.random = random.Random(seed)
        self.routing = Routing(policy, routers, self.random)
        self.tally = Tally()
        self.on_ready: Callable[[Replica], None] = lambda _: None
        self.on_answer: Callable[[Request], None] = lambda _: None
        self.replicas: list[Replica] = []
        for _ in range(count):
            self.add(0.0)
        self.env.run(until=1e-9)

    @property
    def live(self) -> Sequence[Replica]:
        """Replicas that serve."""
        return self.routing.live

    @property
    def busy_seconds(self) -> list[float]:
        """Time that each device has computed."""
        return [each.busy_seconds for each in self.replicas]

    def add(self, ready_after: float) -> None:
        """A replica more, which serves after some seconds."""
        self.replicas.append(Replica(self, len(self.replicas), ready_after))

    def ready(self, replica: Replica) -> None:
        """Called by a replica that serves from now on; routers see it at once."""
        self.routing.change(sorted([*self.live, replica], key=lambda each: each.name))
        self.on_ready(replica)

    def gone(self, replica: Replica) -> None:
        """Called by a replica that crashes; routers see it at once, as its connections close."""
        self.routing.change([each for each in self.live if each is not replica])

    def arrive(self, tokens: int, content: int) -> None:
        """A new request, at a router chosen at random."""
        self.tally.arrived += 1
        self._submit(Request(self.env.now, tokens, content, int(self.random.random() * self.routing.routers)))

    def _submit(self, request: Request) -> None:
        if not self.live:
            self._retry(request)
            return
        replica = self.routing.choose(request)
        self.routing.started(request.router, replica)
        replica.submit(request)

    def lost(self, request: Request, replica: Replica) -> None:
        """A replica refused the request, or crashed before it had answered."""
        self.routing.ended(request.router, replica)
        self._retry(request)

    def _retry(self, request: Request) -> None:
        if request.attempts >= _RETRIES:
            self.tally.failed(request.due)
            return
        pause = min(_MAX_BACKOFF, _FIRST_BACKOFF * 2**request.attempts) * self.random.uniform(0.8, 1.2)
        request.attempts += 1
        self.env.timeout(pause).callbacks.append(lambda _: self._submit(request))

    def answered(self, request: Request, replica: Replica, hit: bool) -> None:
        """Called by a replica whose answer has arrived."""
        self.routing.ended(request.router, replica)
        self.tally.answered(request.due, self.env.now, hit=hit, retried=request.attempts > 0)
        self.on_answer(request)

    def drain(self) -> None:
        """Run until every request was answered or has failed; arrivals must have ended."""
        while self.tally.unfinished:
            self.env.step()
