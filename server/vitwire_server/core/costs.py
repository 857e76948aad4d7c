"""Predicted times, with which the planner chooses between replays and eager forwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from vitwire_server.core.grids import Footprint


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a forward as a function of its tokens.

    Attention within segments is not included, as it does not depend on packing. A replay costs the measured time of
    its budget, or else the linear prediction. An eager forward costs a linear prediction, but at least the time to
    launch its kernels from Python.
    """

    replay_fixed: float
    replay_token: float
    eager_fixed: float
    eager_token: float
    eager_floor: float
    eager_host: float = 0.0
    """Seconds that an eager forward keeps the host busy beyond a replay. They count in full: the same interpreter
    launches the next batch and serves requests."""
    measured: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Seconds of a replay by the budget's tokens, timed right after capture."""
    attention_pair: float = 1e-8
    """Seconds that attention takes for a pair of patches, at most: a large tower on a slow device."""

    def replay(self, tokens: int) -> float:
        """Seconds of one replay of the budget of `tokens`."""
        measured = self.measured.get(tokens)
        return self.replay_fixed + self.replay_token * tokens if measured is None else measured

    def eager(self, tokens: int) -> float:
        """Seconds of one eager forward of `tokens` at the exact shape."""
        return self.eager_host + max(self.eager_floor, self.eager_fixed + self.eager_token * tokens)

    def attention(self, footprints: Sequence[Footprint]) -> float:
        """Seconds that attention within segments adds, at most; neither `replay` nor `eager` counts it."""
        return self.attention_pair * sum(footprint.patches * footprint.longest for footprint in footprints)


EAGER_HOST_SECONDS = 9.0e-3
"""Seconds that an eager forward blocks the host: launching its kernels from Python takes 7 to 11 ms (H200)."""

ASSUMED = Costs(
    replay_fixed=2.0e-3,
    replay_token=8.3e-6,
    eager_fixed=3.0e-3,
    eager_token=8.3e-6,
    eager_floor=8.1e-3,
)
"""Defaults without measurements: fitted to Qwen3-VL-8B's tower on an H200 (docs/performance.md).

On the device a replay took 1.9 ms for 49 tokens and 14.6 ms for 1568, an eager forward 15.4 ms for 1568 and never
less than the 7.6 ms that launching its kernels takes; half a millisecond is added for the host's part of a batch.
Simulated graphs use them too: measured on a CPU, padding would never pay.
"""

ASSUMED_ON_HOST = replace(ASSUMED, attention_pair=5e-6)
"""The same where the CPU computes."""
