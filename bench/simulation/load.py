"""What arrives at a simulated fleet: images, of which a share repeats."""

from collections.abc import Callable, Generator, Sequence

import numpy as np
import numpy.typing as npt
import simpy
from bench.simulation.fleet import Fleet, Replica
from bench.simulation.routing import Words, mixed

CATALOGUE = 200_000
"""Contents that are sent again and again, by Zipf's law."""
_EXPONENT = 0.8
_BLOCK = 4096


class Images:
    """Sizes from a trace, and contents."""

    def __init__(self, tokens: Sequence[int], repeats: float, seed: int) -> None:
        self.tokens, self.repeats = np.array(tokens), repeats
        self.rng = np.random.default_rng(seed)
        weights = 1 / np.arange(1, CATALOGUE + 1) ** _EXPONENT
        self._cumulative = np.cumsum(weights / weights.sum())
        self._next = CATALOGUE

    def sizes(self, contents: Words) -> npt.NDArray[np.int64]:
        """Tokens of each image, which follow from its content."""
        return self.tokens[mixed(contents) % np.uint64(len(self.tokens))]  # type: ignore[no-any-return]

    def draw(self, count: int) -> Words:
        """Contents of the next images: of the catalogue, or new ones."""
        contents = np.searchsorted(self._cumulative, self.rng.random(count)).astype(np.uint64)
        new = self.rng.random(count) >= self.repeats
        contents[new] = np.arange(self._next, self._next + new.sum(), dtype=np.uint64)
        self._next += int(new.sum())
        return contents

    def arrive(self, fleet: Fleet, rate: Callable[[float], float], until: float) -> Generator[simpy.Event, None, None]:
        """A Poisson process at a rate that may change with time."""
        while True:
            contents = self.draw(_BLOCK)
            columns = (contents, self.sizes(contents), self.rng.exponential(size=_BLOCK))
            for content, tokens, gap in zip(*(column.tolist() for column in columns), strict=True):
                yield fleet.env.timeout(gap / rate(fleet.env.now))
                if fleet.env.now >= until:
                    return
                fleet.arrive(tokens, content)

    def fill(self, fleet: Fleet, only: Replica | None = None) -> None:
        """Caches as they are after a long time: each replica has seen what the policy sends it."""
        if not fleet.cache_tokens:
            return
        live = fleet.live
        contents = self.draw(2 * fleet.cache_tokens // int(self.tokens.mean()) * len(live))
        if fleet.routing.policy.endswith("hash"):
            owners = fleet.routing.owners(contents)
        else:
            owners = self.rng.integers(0, len(live), len(contents)).tolist()
        for content, tokens, owner in zip(contents.tolist(), self.sizes(contents).tolist(), owners, strict=True):
            if only is None or live[owner] is only:
                live[owner].remember(content, tokens)
