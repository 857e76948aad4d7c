"""What can go wrong, in the service's own words.

EncoderError
├── InvalidRequest     the caller's mistake, with the fields it is in
├── InvalidTensors     the caller's mistake as well: pixels that no embedding follows from
├── Overloaded         the queue is full: try again later
├── DeadlineExceeded   the caller's deadline passed before device time was spent
├── NotCached          a content_id without pixels is not in the cache
├── Unavailable        starting or draining
└── EncodeFailed       the server's failure on this item
    ├── NonFinite      the tower returned NaN or infinity for finite pixels
    └── OutOfMemory    the device could not hold the item, even alone

DeviceLost is none of these: it ends the process, after what is in flight was answered.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class EncoderError(Exception):
    """Root of the errors that a caller gets to see."""


class Violation(NamedTuple):
    """One wrong field, named as in the proto: `items[2].grid.h`."""

    field: str
    reason: str


class InvalidRequest(EncoderError):
    """The caller's mistake: the request, or one item of it, breaks the contract."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__("; ".join(f"{v.field}: {v.reason}" for v in violations))
        self.violations = tuple(violations)


class InvalidTensors(EncoderError):
    """What a tensor of an item holds cannot be encoded; found by the engine, which does not know the item's number."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        """What is wrong with each of `pixels` and `crops`."""
        super().__init__("; ".join(f"{name}.data: {reason}" for name, reason in reasons.items()))
        self.reasons = dict(reasons)

    def of_item(self, number: int) -> InvalidRequest:
        """The same as an error of item `number` of a request."""
        return InvalidRequest([Violation(f"items[{number}].{name}.data", why) for name, why in self.reasons.items()])


class Overloaded(EncoderError):
    """The queue is full; `retry_seconds` says when to come back."""

    def __init__(self, message: str, *, reason: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_seconds = retry_seconds


class DeadlineExceeded(EncoderError):
    """The deadline passed before the item reached the device."""


class NotCached(EncoderError):
    """The item asked for a cached embedding that is not there."""


class Unavailable(EncoderError):
    """The server is starting or draining."""


class EncodeFailed(EncoderError):
    """The server failed on this item; the caller did nothing wrong."""


class NonFinite(EncodeFailed):
    """The tower returned NaN or infinity for an item whose pixels are finite."""


class OutOfMemory(EncodeFailed):
    """The device could not hold this item, even alone."""


class DeviceLost(Exception):
    """The device is in an error that only a new process can leave."""
