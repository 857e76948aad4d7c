"""Delivery of the rows of a session's items."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from vitwire_server.core.delivery import (
    Consumer,
    Delivered,
    DeviceRows,
    Fallback,
    MemoryKind,
    NotDelivered,
    Placing,
    Region,
    Rows,
)
from vitwire_server.core.items import Embedding
from vitwire_server.core.reports import Encoded


class Courier(Protocol):
    """Writes rows into consumers' memory; see `delivery.courier`."""

    def deliver(self, placing: Placing, rows: Rows, done: Callable[[Delivered | NotDelivered], None]) -> None: ...

    def upload(self, data: memoryview) -> DeviceRows | None:
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


class SharedRows:
    """Rows on the device that others may hold as well, kept until they are not read any more."""

    def __init__(self, rows: DeviceRows) -> None:
        self.address, self.nbytes, self.device = rows.address, rows.nbytes, rows.device
        self._rows: DeviceRows | None = rows

    def is_ready(self) -> bool:
        return self._rows is not None and self._rows.is_ready()

    def release(self) -> None:
        self._rows = None


def from_device(embedding: Embedding, consumer: Consumer) -> DeviceRows | None:
    """The rows where the engine wrote them, if they can be delivered from there."""
    device = embedding.device
    return device if device and (device.device is None) == (consumer.memory is MemoryKind.HOST) else None


def needs_host(embedding: Embedding, consumer: Consumer | None) -> bool:
    """Whether rows have to be copied to the host for a consumer; None gets them in the response."""
    return not embedding.is_on_host and (consumer is None or from_device(embedding, consumer) is None)


def deliver(
    courier: Courier | None, consumer: Consumer, region: Region, outcome: Encoded, done: Callable[[Encoded], None]
) -> None:
    """Deliver rows and call `done` in any thread, or at once, with the outcome that says how they are delivered."""
    embedding = outcome.embedding

    def answer(delivery: Delivered | NotDelivered) -> None:
        done(replace(outcome, delivery=delivery))

    if courier is None:
        answer(NotDelivered(Fallback.OFF))
    elif embedding.nbytes > region.nbytes:
        answer(NotDelivered(Fallback.TOO_SMALL))
    elif (rows := _rows(courier, consumer, embedding)) is None:
        answer(NotDelivered(Fallback.BUSY))
    else:
        courier.deliver(Placing(consumer, region), rows, answer)


def _rows(courier: Courier, consumer: Consumer, embedding: Embedding) -> Rows | None:
    """The rows in the kind of memory that the consumer has: between kinds, NIXL is very slow."""
    rows = from_device(embedding, consumer)
    if rows is None and consumer.memory is MemoryKind.HOST:
        return _HostRows(embedding.data)
    rows = rows or courier.upload(embedding.data)
    return SharedRows(rows) if rows else None
