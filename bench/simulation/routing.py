"""How the routers of a simulated fleet choose a replica."""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from bench.simulation.fleet import Replica, Request

POLICIES = ("round_robin", "least_request", "hash", "bounded_hash")
BOUND = 1.5
"""Of the mean number of requests in flight, as in deploy/examples/envoy."""
_RING_POINTS = 64
_WORD = (1 << 64) - 1

Words = npt.NDArray[np.uint64]
_Number = TypeVar("_Number", int, Words)


class Routing:
    """Each router knows the live replicas and its own requests in flight, not those of other routers."""

    def __init__(self, policy: str, routers: int, rng: random.Random) -> None:
        self.policy, self.routers, self.random = policy, routers, rng
        self.live: Sequence[Replica] = ()
        self._sent: list[defaultdict[int, int]] = [defaultdict(int) for _ in range(routers)]
        """Requests in flight by router and replica."""
        self._open = [0] * routers
        """Their sums."""
        self._turns = [rng.randrange(1 << 20) for _ in range(routers)]
        self._ring: Words = np.zeros(0, np.uint64)
        self._owners: list[int] = []
        """For each point of the ring, the index of its replica in `live`."""

    def change(self, live: Sequence["Replica"]) -> None:
        """Replicas came or went."""
        self.live, self._owners = live, []

    def started(self, router: int, replica: "Replica") -> None:
        """A request is in flight."""
        self._sent[router][replica.name] += 1
        self._open[router] += 1

    def ended(self, router: int, replica: "Replica") -> None:
        """It no longer is."""
        self._sent[router][replica.name] -= 1
        self._open[router] -= 1

    def choose(self, request: "Request") -> "Replica":
        """The replica for a request; a retry goes to the less loaded of two, so that it leaves a full owner."""
        if self.policy == "round_robin":
            self._turns[request.router] += 1
            return self.live[self._turns[request.router] % len(self.live)]
        if self.policy == "least_request" or request.attempts:
            first, second = (self.live[int(self.random.random() * len(self.live))] for _ in range(2))
            sent = self._sent[request.router]
            return first if sent[first.name] <= sent[second.name] else second
        return self._on_ring(request)

    def owners(self, contents: Words) -> list[int]:
        """For each content, the index in `live` of the replica that the ring gives it to."""
        self._lay_ring()
        places = np.searchsorted(self._ring, mixed(contents)) % len(self._ring)
        return np.array(self._owners)[places].tolist()  # type: ignore[no-any-return]

    def _lay_ring(self) -> None:
        if self._owners:
            return
        names = np.array([each.name for each in self.live], np.uint64)
        points = np.arange(_RING_POINTS, dtype=np.uint64)
        ring = mixed(mixed(names[:, None] + np.uint64(1 << 40)) + points).reshape(-1)
        order = np.argsort(ring)
        self._ring, self._owners = ring[order], (order // _RING_POINTS).tolist()

    def _on_ring(self, request: "Request") -> "Replica":
        """The owner of a content; with a bound, the next replica on the ring that is not overloaded."""
        self._lay_ring()
        place = int(np.searchsorted(self._ring, np.uint64(mixed(request.content)))) % len(self._ring)
        found = self.live[self._owners[place]]
        if self.policy == "hash":
            return found
        sent = self._sent[request.router]
        limit = max(1, math.ceil(BOUND * (self._open[request.router] + 1) / len(self.live)))
        while sent[found.name] > limit:
            place = (place + 1) % len(self._ring)
            found = self.live[self._owners[place]]
        return found


def mixed(number: _Number) -> _Number:
    """Spread over 64 bits, the same for an int and for an array (SplitMix64's finaliser)."""
    word: Any = number
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return cast("_Number", word ^ (word >> 31))
