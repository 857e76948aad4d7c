"""How long the engine's thread has been silent, beyond what its work explains."""

from collections.abc import Callable

_LENIENCE = 10.0
"""How many times its predicted time a batch may take before that counts as silence."""


class Watchdog:
    """Fed by the engine's thread, read by any."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_beat = clock()
        self._allowance = 0.0

    def beat(self, predicted: float = 0.0, attention: float = 0.0) -> None:
        """The engine's thread is alive; the work under way explains these seconds of silence from now on.

        `attention` is an upper bound already, `predicted` is not.
        """
        self._allowance = _LENIENCE * predicted + attention
        self._last_beat = self._clock()

    def silence(self) -> float:
        """Seconds without a beat that the work under way does not explain."""
        return max(0.0, self._clock() - self._last_beat - self._allowance)
