"""When batches are done that share a host and a device: the host launches one while the device computes another."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Work(NamedTuple):
    """What one batch occupies."""

    host: float
    """Seconds that the host is busy with staging and launching."""
    lead: float
    """Seconds of the host before the device can start."""
    device: float
    """Seconds of the device, once it is free."""

    @property
    def alone(self) -> float:
        """Seconds from an idle engine to the result."""
        return max(self.host, self.lead + self.device)

    def scaled(self, factor: float) -> "Work":
        """The same at another pace."""
        return Work(factor * self.host, factor * self.lead, factor * self.device)


class Timeline:
    """Batches in the order of their launch, at most `depth` of them in flight."""

    def __init__(self, depth: int = 2) -> None:
        self._host = self.end = 0.0
        self._ends: deque[float] = deque(maxlen=depth)

    @property
    def next_launch(self) -> float:
        """When the host can launch another batch."""
        full = len(self._ends) == self._ends.maxlen
        return max(self._host, self._ends[0]) if full else self._host

    @property
    def backlog(self) -> float:
        """Seconds that the device is still busy when the host can launch another batch."""
        return max(0.0, self.end - self.next_launch)

    def run(self, work: Work) -> None:
        """Launch a batch as soon as possible."""
        start = self.next_launch
        self._host = start + work.host
        self.end = end_of(work, start, self.end)
        self._ends.append(self.end)


def end_of(work: Work, start: float, device_free: float) -> float:
    """When a batch is done that the host begins to launch at `start`."""
    return max(start + work.host, max(start + work.lead, device_free) + work.device)


def together(works: Iterable[Work], backlog: float = 0.0) -> float:
    """About the seconds until all of `works` are done, in any order, on a device that is busy for `backlog` seconds."""
    host = device = lead = 0.0
    for work in works:
        host += work.host
        device += work.device
        lead = max(lead, work.lead)
    return max(host, max(backlog, lead) + device)
