"""Delivery of the rows of a session's items."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from vitwire_server.core.delivery import Consumer, Delivered, Fallback, NotDelivered, Placing, Region, Rows
from vitwire_server.core.reports import Encoded


class Courier(Protocol):
    """Writes rows into consumers' memory; see `delivery.courier`."""

    def deliver(self, placing: Placing, rows: Rows, done: Callable[[Delivered | NotDelivered], None]) -> None: ...


class _HostRows:
    """The rows of an embedding on the host, kept until they are not read any more."""

    device = None

    def __init__(self, data: memoryview) -> None:
        self._array = np.frombuffer(data, np.uint8)
        self.address: int = self._array.ctypes.data
        self.nbytes = len(self._array)

    def is_ready(self) -> bool:
        return True

    def release(self) -> None:
        self._array = np.empty(0, np.uint8)


def deliver(
    courier: Courier | None, consumer: Consumer, region: Region, outcome: Encoded, done: Callable[[Encoded], None]
) -> None:
    """Deliver rows and call `done` in any thread, or at once, with the outcome that says how they are delivered."""
    if courier is None:
        done(replace(outcome, delivery=NotDelivered(Fallback.OFF)))
    elif outcome.embedding.nbytes > region.nbytes:
        done(replace(outcome, delivery=NotDelivered(Fallback.TOO_SMALL)))
    else:
        rows = _HostRows(outcome.embedding.data)
        courier.deliver(Placing(consumer, region), rows, lambda delivery: done(replace(outcome, delivery=delivery)))
