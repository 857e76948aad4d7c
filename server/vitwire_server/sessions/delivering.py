"""Delivery of the rows of a session's items."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from vitwire_server.core.delivery import (
    Consumer,
    Delivered,
    Fallback,
    MemoryKind,
    NotDelivered,
    Placing,
    Region,
    Rows,
)
from vitwire_server.core.reports import Encoded, Outcome


class Courier(Protocol):
    """Writes rows into consumers' memory; see `delivery.courier`."""

    def deliver(self, placing: Placing, rows: Rows, done: Callable[[Delivered | NotDelivered], None]) -> None: ...

    def upload(self, data: memoryview) -> Rows | None:
        """The rows on the server's device; None without a device, or room on it."""
        ...


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
    embedding = outcome.embedding

    def answer(delivery: Delivered | NotDelivered) -> None:
        if isinstance(delivery, NotDelivered) and embedding.device:
            embedding.device.finish_host_copy()
        done(replace(outcome, embedding=replace(embedding, device=None), delivery=delivery))

    if courier is None:
        answer(NotDelivered(Fallback.OFF))
    elif embedding.nbytes > region.nbytes:
        answer(NotDelivered(Fallback.TOO_SMALL))
    elif (rows := _rows(courier, consumer, outcome)) is None:
        answer(NotDelivered(Fallback.BUSY))
    else:
        courier.deliver(Placing(consumer, region), rows, answer)


def for_others(outcome: Outcome) -> Outcome:
    """The outcome for other items of the same content, and for the cache: complete, and on the host only."""
    if not isinstance(outcome, Encoded) or outcome.embedding.device is None:
        return outcome
    outcome.embedding.device.finish_host_copy()
    return replace(outcome, embedding=replace(outcome.embedding, device=None))


def _rows(courier: Courier, consumer: Consumer, outcome: Encoded) -> Rows | None:
    """The rows in the kind of memory that the consumer has: between kinds, NIXL is very slow."""
    if consumer.memory is MemoryKind.HOST:
        return _HostRows(outcome.embedding.data)
    return outcome.embedding.device or courier.upload(outcome.embedding.data)
