"""Delivery of rows into a consumer's memory: who receives them, where, and what came of it."""

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from hashlib import blake2b
from typing import Protocol

_MAX_ADDRESS = 1 << 64


class MemoryKind(Enum):
    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Consumer:
    """A client's agent and the memory that it registered for rows."""

    principal: str
    """The client's principal; no other may use its agent."""
    agent: str
    metadata: bytes = field(repr=False)
    memory: MemoryKind
    device: int
    address: int
    nbytes: int
    digest: bytes = field(init=False, repr=False)
    """Digest of the metadata: agents are the same if name and digest are."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", blake2b(self.metadata, digest_size=16).digest())

    def problem(self) -> str | None:
        """The fault of the memory; None if it is a range of addresses."""
        if self.nbytes < 1 or self.address < 1:
            return "must name the address and the bytes of the registered memory"
        if self.address + self.nbytes > _MAX_ADDRESS:
            return f"{self.nbytes} bytes at {self.address:#x} are beyond the end of memory"
        return None


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a consumer's memory that is leased to one item."""

    offset: int
    nbytes: int

    def problem(self, consumer: Consumer, needed: int) -> str | None:
        """Why `needed` bytes cannot be written here; None if they can."""
        if self.offset + self.nbytes > consumer.nbytes:
            return f"{self.nbytes} bytes at {self.offset} are not within the {consumer.nbytes} bytes of the delivery"
        if self.nbytes < needed:
            return f"has {self.nbytes} bytes, the rows have {needed}"
        return None


@dataclass(frozen=True, slots=True)
class Placing:
    """Where the rows of an item are to be written."""

    consumer: Consumer
    region: Region


class Fallback(StrEnum):
    """Why rows are sent in the response although the item has a region."""

    BUSY = "busy"
    """Too many transfers are under way, or there is no room. Nothing is written: the client uses the region again."""
    REFUSED = "refused"
    """The agent cannot be used: its metadata is invalid, or its name belongs to another."""
    FAILED = "failed"
    """The transfer failed: the consumer is gone, or the region is not in its registered memory."""
    TIMEOUT = "timeout"
    """The transfer took too long, or an earlier one to this agent did."""
    TOO_SMALL = "too_small"
    """The region of an item without pixels is smaller than the rows that were cached."""
    OFF = "off"
    """NIXL delivery is not enabled, has ended, or does not reach devices."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """The rows are complete in the consumer's memory, at the start of the region."""

    region: Region
    seconds: float


@dataclass(frozen=True, slots=True)
class Stored:
    """The rows are in the embedding cache, and none are returned."""


@dataclass(frozen=True, slots=True)
class NotDelivered:
    """The rows have to be sent in the response."""

    reason: Fallback


class _Memory(Protocol):
    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> int | None:
        """Number of the CUDA device; None for memory of the host."""
        ...

    def is_ready(self) -> bool:
        """Whether the rows are complete. Must not block."""
        ...


class Rows(_Memory, Protocol):
    """Rows to deliver, in memory of this process. Its owner must not change them until `release` is called."""

    def release(self) -> None:
        """The memory is not read any more. Called once, by any thread; perhaps long after the outcome is known."""
        ...


class DeviceRows(_Memory, Protocol):
    """Rows in the memory that the server delivers from. They stay unchanged for as long as anything refers to them."""

    @property
    def taken(self) -> int:
        """Bytes of memory that they take."""
        ...

    def download(self) -> memoryview:
        """A copy on the host. Blocks; called by any thread."""
        ...
