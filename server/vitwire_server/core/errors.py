"""The errors of the service.

EncoderError
├── InvalidRequest     the caller's mistake, with the invalid fields
├── InvalidTensors     the caller's mistake as well: pixels that cannot be encoded
├── Overloaded         a bound is reached: retry later
├── DeadlineExceeded   the caller's deadline passed before device time was spent
├── NotCached          a content_id without pixels is not in the cache
├── Unavailable        starting or draining
└── EncodeFailed       the server's failure on this item
    ├── NonFinite      the tower returned NaN or infinity for finite pixels
    └── OutOfMemory    the device could not hold the item, even alone

DeviceLost is not one of them: it ends the process once everything in flight is answered.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class EncoderError(Exception):
    """Base of the errors that callers see. Picklable, whatever a constructor takes."""

    def __reduce__(self) -> tuple[Callable[..., "EncoderError"], tuple[object, ...]]:
        return _rebuilt, (type(self), self.args, self.__dict__)


class Violation(NamedTuple):
    """One invalid field, named as in the proto: `items[2].grid.h`."""

    field: str
    reason: str


class InvalidRequest(EncoderError):
    """The caller's mistake: the request, or one item of it, breaks the contract."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__("; ".join(f"{v.field}: {v.reason}" for v in violations))
        self.violations = tuple(violations)


class InvalidTensors(EncoderError):
    """A tensor holds values that cannot be encoded; found by the engine, which does not know the item's number."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        """Reasons by tensor: `pixels`, `crops`."""
        super().__init__("; ".join(f"{name}.data: {reason}" for name, reason in reasons.items()))
        self.reasons = dict(reasons)

    def of_item(self, number: int) -> InvalidRequest:
        """The same as an error of item `number` of a request."""
        return InvalidRequest([Violation(f"items[{number}].{name}.data", why) for name, why in self.reasons.items()])


class Overloaded(EncoderError):
    """A bound is reached; retry after `retry_seconds`."""

    def __init__(self, message: str, *, reason: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_seconds = retry_seconds


class DeadlineExceeded(EncoderError):
    """The deadline passed before the item reached the device."""


class NotCached(EncoderError):
    """No embedding is cached under the item's content_id."""


class Unavailable(EncoderError):
    """The server is starting or draining."""


class EncodeFailed(EncoderError):
    """The server failed on this item; the caller did nothing wrong."""


class NonFinite(EncodeFailed):
    """The tower returned NaN or infinity for an item whose pixels are finite."""


class OutOfMemory(EncodeFailed):
    """The device could not hold this item, even alone."""


class DeviceLost(Exception):
    """The device is in a state that only a new process can recover from."""


def _rebuilt(kind: type[EncoderError], arguments: tuple[object, ...], state: Mapping[str, object]) -> EncoderError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(state)
    return error
