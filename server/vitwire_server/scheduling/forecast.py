"""Duration of work: predicted costs at the measured pace."""

from collections import deque

from vitwire_server.core.costs import Work, end_of

_BATCHES = 32


class Forecast:
    """Corrects predicted times by the times of the last batches.

    On a device whose costs were measured at start the pace is about 1; if they are assumed, as on a
    CPU, it is the factor by which they are off.
    """

    def __init__(self) -> None:
        self._batches: deque[tuple[float, float]] = deque(maxlen=_BATCHES)
        self._in_flight: deque[Work] = deque()
        self._busy_until = 0.0
        self._last_end = 0.0
        self._interrupted = 0.0
        self.pace = 1.0
        """Measured over predicted seconds; 1 until something ran."""

    def launched(self, predicted: Work, now: float) -> None:
        """A batch was started behind those in flight."""
        self._in_flight.append(predicted)
        self._busy_until = end_of(predicted.scaled(self.pace), now, self._busy_until)

    def ran(self, predicted: Work, started: float, now: float) -> None:
        """The oldest batch in flight is done; it had the device to itself since the previous one ended."""
        since = max(started, self._last_end)
        if started >= self._interrupted:
            self._batches.append((end_of(predicted, started, self._last_end) - since, now - since))
            expected, spent = map(sum, zip(*self._batches, strict=True))
            self.pace = spent / expected if expected > 0 and spent else 1.0
        self._last_end = now
        if self._in_flight:
            self._in_flight.popleft()
        self._busy_until = now + self.pace * sum(work.device for work in self._in_flight)

    def backlog(self, now: float) -> float:
        """Seconds until what is in flight is done."""
        return max(0.0, self._busy_until - now)

    def interrupted(self, now: float) -> None:
        """Until now the engine did something else: what is in flight says nothing about the pace."""
        self._interrupted = now

    def wait(self, ahead: float, now: float) -> float:
        """Seconds until what is in flight, and work of `ahead` predicted seconds, is done."""
        return self.backlog(now) + ahead * self.pace

    def alone(self, predicted: float) -> float:
        """Seconds that work takes at least: a slow pace may come from batches of other sizes."""
        return predicted * min(1.0, self.pace)
