"""How long work will take: predicted costs at the measured pace."""

from collections import deque

_BATCHES = 32


class Forecast:
    """Corrects predicted times by those of the last batches.

    On a device whose costs were measured at start the pace is about 1; where they are assumed, as on a
    CPU, it is the factor by which they are off.
    """

    def __init__(self) -> None:
        self._batches: deque[tuple[float, float]] = deque(maxlen=_BATCHES)
        self._busy_until = 0.0
        self._last_end = 0.0
        self._interrupted = 0.0
        self.pace = 1.0
        """Measured over predicted seconds; 1 until something ran."""

    def launched(self, predicted: float, now: float) -> None:
        """A batch was started behind those in flight."""
        self._busy_until = max(self._busy_until, now) + predicted * self.pace

    def ran(self, predicted: float, started: float, now: float) -> None:
        """A batch is done; it had the device to itself since the previous one ended."""
        since, self._last_end = max(started, self._last_end), now
        if started < self._interrupted:
            return
        self._batches.append((predicted, now - since))
        expected, spent = map(sum, zip(*self._batches, strict=True))
        self.pace = spent / expected if expected and spent else 1.0

    def interrupted(self, now: float) -> None:
        """Until now the engine did something else: what is in flight says nothing about the pace."""
        self._interrupted = now

    def idle(self) -> None:
        """Nothing is in flight."""
        self._busy_until = 0.0

    def wait(self, ahead: float, now: float) -> float:
        """Seconds until what is in flight, and work of `ahead` predicted seconds, is done."""
        return max(0.0, self._busy_until - now) + ahead * self.pace

    def alone(self, predicted: float) -> float:
        """Seconds that work takes at least: a slow pace may come from batches of other sizes."""
        return predicted * min(1.0, self.pace)
