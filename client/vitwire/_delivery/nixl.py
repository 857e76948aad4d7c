"""Delivery of rows through NIXL: whether a request uses it, and what happens when it fails."""

import logging
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple
from weakref import finalize

import numpy as np

from vitwire._delivery.answers import Expected
from vitwire._delivery.leases import Lease, Pool
from vitwire.embeddings import DTYPES, STORAGE
from vitwire.errors import EncodeFailed
from vitwire.model import Model
from vitwire.shared.agents import MISSING, AgentError, is_installed
from vitwire.v1 import encoder_pb2 as pb

log = logging.getLogger("vitwire")
Delivery = Literal["auto", "stream", "nixl"]
DELIVERIES: tuple[Delivery, ...] = ("auto", "stream", "nixl")
POOL_BYTES = 256 << 20
_SHORTEST_PAUSE, _LONGEST_PAUSE = 60.0, 3600.0
"""After a failed delivery, for which rows come in responses; doubled with each failure until one succeeds."""
_ABANDONED_SHARE = 1 / 4
"""A pool without room is replaced once this share of it is abandoned."""
ROOM_SECONDS = 0.002
"""Between looks for room to lease."""
_BUSY = "busy"
"""The server's reason if it has no room for a transfer now, and did not begin it."""
_ROOM_SECONDS = 5.0
"""For which an item whose rows the server announced waits for room: the server holds a place in its queue for it."""

_inherited: list[Pool | None] = []
"""Pools of the process that this one was forked from. To close their agents here would disturb that process."""


class Nixl:
    """The pool of a client, made when it is first needed. Thread-safe."""

    def __init__(self, delivery: Delivery, device: str | None, nbytes: int) -> None:
        """Raises ValueError for an unknown way."""
        if delivery not in DELIVERIES:
            raise ValueError(f"delivery must be one of {', '.join(DELIVERIES)}, got {delivery!r}")
        if device is not None and not device.startswith("cuda"):
            raise ValueError(f"device must be None or a CUDA device such as 'cuda:0', got {device!r}")
        if device is not None and delivery == "stream":
            raise ValueError("device needs delivery='nixl' or 'auto': embeddings in a stream arrive on the host")
        self.is_required = delivery == "nixl"
        self._is_wanted = self.is_required or (delivery == "auto" and device is not None)  # to the host, streams win
        self._device = device
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._process = os.getpid()
        self._paused_until = 0.0
        self._pause = _SHORTEST_PAUSE
        self._closed = False
        self._logged = ""

    def leasing(self, model: Model, output_type: "pb.DataType.ValueType") -> "Leasing | None":
        """Leasing for a request to this server; None if its embeddings come in the response. Raises EncodeFailed."""
        if not self._is_wanted:
            return None
        reason = None if "nixl" in model.deliveries else "the server does not offer it (start it with --nixl)"
        if reason is None and not is_installed():
            reason = MISSING
        if reason:
            self._unavailable(reason)
            return None
        dtype = DTYPES.get(output_type, model.dtype)
        return Leasing(self, np.dtype(STORAGE[dtype]).itemsize) if dtype in STORAGE else None

    def pool(self) -> Pool | None:
        """The pool to lease from; None if rows come in responses for now. Raises EncodeFailed."""
        with self._lock:
            if self._closed or not self._is_wanted or time.monotonic() < self._paused_until:
                return None
            if self._process != os.getpid():  # agents do not survive a fork
                self._process = os.getpid()
                _inherited.append(self._pool)
                self._pool = None
            if self._pool is None:
                try:
                    self._pool = Pool(self._nbytes, self._device)
                except AgentError as error:
                    self._wait()
                    self._unavailable(str(error))
                else:
                    finalize(self, self._pool.close)  # a client that was not closed, or the end of the process
            return self._pool

    def full(self, pool: Pool) -> None:
        """The pool has no room: replace it if abandoned leases are the reason."""
        with self._lock:
            if pool is self._pool and pool.abandoned >= _ABANDONED_SHARE * pool.size:
                self._retire()

    def failed(self, pool: Pool, reason: str) -> None:
        """The server delivered rows in the response instead."""
        with self._lock:
            if pool is not self._pool:
                return
            self._retire()
            seconds = self._wait()
        log.warning("NIXL delivery failed (%s): embeddings come in responses for the next %d s", reason, seconds)

    def succeeded(self) -> None:
        """The server delivered rows."""
        self._pause = _SHORTEST_PAUSE

    def close(self) -> None:
        """Lease no more."""
        if self._process != os.getpid():  # another thread may have held the lock at the fork
            self._closed = True
            _inherited.extend(filter(None, [self._pool]))
            self._pool = None
            return
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool:
            pool.close()

    def _wait(self) -> float:
        """Pause; returns the seconds."""
        seconds, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        self._paused_until = time.monotonic() + seconds
        return seconds

    def _retire(self) -> None:
        if self._pool:
            self._pool.retire()
        self._pool = None

    def _unavailable(self, reason: str) -> None:
        """Log why responses are used, once. Raises EncodeFailed if NIXL is required."""
        if self.is_required:
            raise EncodeFailed(f"delivery='nixl' is not possible: {reason}", code="FAILED_PRECONDITION")
        if reason != self._logged:
            self._logged = reason
            log.info("embeddings come in responses, NIXL is not used: %s", reason)


class Leasing(NamedTuple):
    """Leases for the items of one request."""

    nixl: Nixl
    value_bytes: int

    def leases(self, expected: Sequence[Expected], late: Collection[int] = ()) -> "Leases | None":
        """Leases of an RPC, without those that there is no room for; None if the RPC has to wait for room.

        late: numbers of the items that are leased memory once the server has announced their rows.
        Raises EncodeFailed if NIXL is required and cannot be used, or the RPC needs more than there is.
        """
        pool = self.nixl.pool()
        if pool is None:
            return Leases(self.nixl, None, (None,) * len(expected))
        sizes = [each.rows * each.width * self.value_bytes for each in expected]
        if self.nixl.is_required:
            pool.check_fits(sizes)
        row_bytes = {number: expected[number].width * self.value_bytes for number in late}
        leases = Leases(self.nixl, pool, [pool.lease(size) if size else None for size in sizes], row_bytes)
        if all(lease for lease, size in zip(leases.leases, sizes, strict=True) if size):
            return leases
        self.nixl.full(pool)
        if not self.nixl.is_required:
            return leases
        leases.release()
        return None


class Leases:
    """The leases of one attempt, by the number of its item. Thread-safe: one thread sends, another receives.

    Late leases are made by the thread that sends, once the server has announced an item's rows: see `next_region`.
    """

    def __init__(
        self, nixl: Nixl, pool: Pool | None, leases: Sequence[Lease | None], row_bytes: Mapping[int, int] | None = None
    ) -> None:
        """row_bytes: bytes of a row of each item that is leased memory late."""
        self._nixl = nixl
        self._pool = pool
        self.leases = list(leases)
        self._row_bytes = row_bytes or {}
        self._undecided = set(self._row_bytes)
        """Items that may still be leased memory."""
        self._announced: dict[int, tuple[int, float]] = {}
        """Bytes of the rows that the server announced, and until when these items wait for room, monotonic."""
        self._changed = threading.Condition()

    @property
    def delivery(self) -> pb.Delivery | None:
        """The memory of the leases; None without any."""
        return self._pool.delivery if self._pool and (any(self.leases) or self._row_bytes) else None

    def is_late(self, number: int) -> bool:
        """Whether the region of an item follows its header."""
        return number in self._row_bytes

    def announced(self, number: int, rows: int) -> None:
        """The server announced the rows of an item. Raises EncodeFailed if the RPC needs more than there is."""
        with self._changed:
            if number not in self._undecided or self._pool is None:
                return
            nbytes = rows * self._row_bytes[number]
            if self._nixl.is_required:
                taken = [lease.region.nbytes for lease in self.leases if lease]
                self._pool.check_fits([*taken, *(each for each, _ in self._announced.values()), nbytes])
            self._announced[number] = nbytes, time.monotonic() + _ROOM_SECONDS
            self._changed.notify_all()

    def next_region(self, sent: int, *, wait: int | None = None) -> pb.EncodeStreamRegion | None:
        """The messages about items' memory, in the order in which the server announced their embeddings.

        sent: number of items of which headers were sent.
        wait: until fewer than this number of them are undecided; by default not at all.
        Returns None if there is nothing to send, or no need to wait.
        """
        with self._changed:
            while True:
                if self._announced and (decided := self._decided(next(iter(self._announced)))):
                    return decided
                undecided = sum(number < sent for number in self._undecided)
                if wait is None or undecided < wait:
                    return None
                self._changed.wait(ROOM_SECONDS if self._announced else None)

    def delivered(self, number: int) -> Lease | None:
        """The lease of an item whose rows the server wrote."""
        self._nixl.succeeded()
        return self.leases[number]

    def refused(self, number: int) -> None:
        """The server answered an item with an error."""
        with self._changed:
            self._settle({number})
        if lease := self.leases[number]:
            lease.release()

    def returned(self, number: int, reason: str) -> None:
        """The rows of an item came in the response."""
        with self._changed:
            self._settle({number})
        lease = self.leases[number]
        if lease and (reason == _BUSY or (self.is_late(number) and not reason)):
            lease.release()  # the server wrote nothing: without a reason, the region came after it had stopped waiting
        elif lease and self._pool:
            lease.abandon()
            self._nixl.failed(self._pool, reason or "the server gave no reason")

    def release(self) -> None:
        """The server has not begun with the items that are not answered, but for those whose rows it announced."""
        for number, lease in enumerate(self._ended()):
            if lease and self.is_late(number):
                lease.abandon()
            elif lease:
                lease.release()

    def abandon(self) -> None:
        """The server may be at work on the items that are not answered."""
        for lease in self._ended():
            if lease:
                lease.abandon()

    def _ended(self) -> list[Lease | None]:
        """The lease of each item; none is added any more."""
        with self._changed:
            self._settle(set(self._undecided))
            return self.leases

    def _settle(self, numbers: set[int]) -> None:
        """Nothing will be leased to these items any more."""
        self._undecided -= numbers
        for number in numbers:
            self._announced.pop(number, None)
        self._changed.notify_all()

    def _decided(self, number: int) -> pb.EncodeStreamRegion | None:
        """The region for an item, or none if its rows are to come in the response; None while it waits for room."""
        assert self._pool, "memory is leased late only from a pool"
        nbytes, until = self._announced[number]
        lease = self._pool.lease(nbytes)
        if lease is None:
            self._nixl.full(self._pool)
            if self._nixl.is_required and not self._pool.is_retired and time.monotonic() < until:
                return None
        self.leases[number] = lease
        self._settle({number})
        region = pb.Region(offset=lease.region.offset, bytes=lease.region.nbytes) if lease else None
        return pb.EncodeStreamRegion(item=number, region=region)
