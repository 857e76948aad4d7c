"""How long the engine's thread has been silent, beyond what its work explains."""

from collections.abc import Callable

_LENIENCE = 10.0
"""How many times its predicted time a batch may take before that counts as silence."""


class Watchdog:
    """Fed by the engine's thread, read by any."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._explained_until = clock()
        """One number, so that another thread never reads half of a beat."""

    def beat(self, predicted: float = 0.0, attention: float = 0.0) -> None:
        """The engine's thread is alive; the work under way explains these seconds of silence from now on.

        `attention` is an upper bound already, `predicted` is not.
        """
        self._explained_until = self._clock() + _LENIENCE * predicted + attention

    def silence(self) -> float:
        """Seconds without a beat that the work under way does not explain."""
        return max(0.0, self._clock() - self._explained_until)
