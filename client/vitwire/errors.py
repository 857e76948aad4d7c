"""All errors of the client. gRPC's errors are translated here and never reach the caller.

VitwireError
├── InvalidItem        an item or the request is invalid; do not retry
├── Unauthenticated    the token is missing, wrong or not allowed to do this
├── NotCached          the content_id is not in the cache; send the item with its pixels
├── Overloaded         the queue or the device is full; retry after `retry_after` seconds
├── DeadlineExceeded   the timeout passed, or the server could not meet it
├── Unavailable        no server answers, or it is starting or draining; already retried
└── EncodeFailed       the server failed on the item, or its response was invalid
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, TypedDict, TypeVar, Unpack

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status

M = TypeVar("M", BadRequest, RetryInfo)
_STATUS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
REQUEST_ID_KEY = "x-request-id"
"""Key of the request id in the metadata of a request and in the trailers of its response."""


class Violation(NamedTuple):
    """An invalid field, named as in the proto (`items[2].grid.h`), and what is wrong with it."""

    field: str
    description: str


class _Named(TypedDict, total=False):
    """Arguments of every error."""

    code: str | None
    item: int | None
    request_id: str | None


class VitwireError(Exception):
    """Base class of all errors of this package.

    `code` is the name of the gRPC status (`"UNAVAILABLE"`); `item` is the position of the item that failed, None
    if the whole request failed; `request_id` is the id of the request in the server's logs and traces, None if none
    was sent.
    """

    default_code: ClassVar[str] = "UNKNOWN"

    def __init__(
        self, message: str, *, code: str | None = None, item: int | None = None, request_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.item = item
        self.request_id = request_id

    def __repr__(self) -> str:
        fields = {"code": self.code, "item": self.item, "request_id": self.request_id}
        named = "".join(f", {name}={value!r}" for name, value in fields.items() if value is not None)
        return f"{type(self).__name__}({str(self)!r}{named})"


class InvalidItem(VitwireError):
    """An item or the request is invalid: `violations` names each invalid field."""

    default_code = "INVALID_ARGUMENT"

    def __init__(self, message: str, *, violations: Sequence[Violation] = (), **named: Unpack[_Named]) -> None:
        super().__init__(message, **named)
        self.violations = tuple(violations)


class Unauthenticated(VitwireError):
    """The token is missing, wrong or not allowed to do this."""

    default_code = "UNAUTHENTICATED"


class NotCached(VitwireError):
    """The server has no cached embedding for this content_id: send the item with its pixels."""

    default_code = "NOT_FOUND"


class Overloaded(VitwireError):
    """The queue or the device is full; `retry_after` is in seconds, None if the server did not set it."""

    default_code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after: float | None = None, **named: Unpack[_Named]) -> None:
        super().__init__(message, **named)
        self.retry_after = retry_after


class DeadlineExceeded(VitwireError):
    """The timeout passed, or the server could not meet it."""

    default_code = "DEADLINE_EXCEEDED"


class Unavailable(VitwireError):
    """No server answers, or it is starting or draining; `max_retries` or the timeout allows no further retry.

    `is_permanent` is True if no attempt can succeed, so there were no retries: the port is not a gRPC server's,
    or client and server do not agree about TLS.
    """

    default_code = "UNAVAILABLE"
    is_permanent = False


class EncodeFailed(VitwireError):
    """The server failed on the item, or its response was invalid."""

    default_code = "INTERNAL"


_BY_CODE: dict[str, type[VitwireError]] = {
    "INVALID_ARGUMENT": InvalidItem,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": Unauthenticated,
    "NOT_FOUND": NotCached,
    "RESOURCE_EXHAUSTED": Overloaded,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "UNAVAILABLE": Unavailable,
}
_CODE_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


def from_status(status: Status, item: int, indices: Sequence[int] = ()) -> VitwireError:
    """The error of one item from a response; `indices` as for `from_rpc`."""
    code = _CODE_NAMES.get(status.code, "UNKNOWN")
    return _error(code, status.message, status.details, item=item, indices=indices)


def from_rpc(error: grpc.RpcError, indices: Sequence[int] = ()) -> VitwireError:
    """The error of a whole RPC; `indices` are the positions of its items in the caller's request."""
    pairs: Any = error.trailing_metadata() or ()  # pairs; the stubs disagree
    metadata: dict[str, str | bytes] = dict(pairs)
    details: Iterable[AnyMessage] = ()
    with suppress(DecodeError):  # code and message are still valid
        details = Status.FromString(_bytes(metadata.get(_STATUS_KEY, b""))).details
    code, message = error.code().name, error.details() or ""
    if code == "CANCELLED":  # not by this client, which does not ask what became of calls that it cancelled
        code, message = "UNAVAILABLE", f"the server, or a proxy in front of it, cancelled the request: {message}"
    if code in ("INTERNAL", "RESOURCE_EXHAUSTED") and "RST_STREAM" in message:  # cut off by a proxy
        code = "UNAVAILABLE"
    if code == "UNIMPLEMENTED" and not is_from_server(error):
        message = f"the target is not a Vitwire server, or has another version: {message}"
    translated = _error(code, message, details, indices=indices)
    if isinstance(translated, Overloaded) and translated.retry_after is None:
        translated.retry_after = _milliseconds(metadata.get(_PUSHBACK_KEY, ""))
    if isinstance(request_id := metadata.get(REQUEST_ID_KEY), str):
        translated.request_id = request_id
    return translated


def is_from_server(error: grpc.RpcError) -> bool:
    """Whether the status came from the server rather than from gRPC in the client."""
    pairs: Any = error.trailing_metadata() or ()  # as in `from_rpc`
    return any(key == _STATUS_KEY for key, _ in pairs)


def _error(
    code: str,
    message: str,
    details: Iterable[AnyMessage],
    *,
    item: int | None = None,
    indices: Sequence[int] = (),
) -> VitwireError:
    kind = _BY_CODE.get(code, EncodeFailed)
    message = _renumbered(message or code, indices)
    if kind is InvalidItem:
        violations = [
            Violation(_renumbered(found.field, indices), found.description)
            for bad in _unpacked(details, BadRequest)
            for found in bad.field_violations
        ]
        return InvalidItem(message, code=code, item=_item(violations, item), violations=violations)
    if kind is Overloaded:
        delays = [info.retry_delay for info in _unpacked(details, RetryInfo) if info.HasField("retry_delay")]
        seconds = delays[0].seconds + delays[0].nanos / 1e9 if delays else None
        return Overloaded(message, code=code, item=item, retry_after=seconds)
    return kind(message, code=code, item=item)


def _unpacked(details: Iterable[AnyMessage], kind: type[M]) -> Iterator[M]:
    for detail in details:
        message = kind()
        with suppress(DecodeError):
            if detail.Unpack(message):
                yield message


def _item(violations: Sequence[Violation], item: int | None) -> int | None:
    """The item of the violations, if they are all about one item."""
    named = {int(found[1]) for each in violations if (found := re.match(r"items\[(\d{1,9})\]", each.field))}
    return item if item is not None or len(named) != 1 else named.pop()


def _renumbered(text: str, indices: Sequence[int]) -> str:
    """The text with `items[i]` of an RPC replaced by positions in the caller's request."""

    def number(found: re.Match[str]) -> str:
        position = int(found[1])
        return f"items[{indices[position]}]" if position < len(indices) else found[0]

    return re.sub(r"\bitems\[(\d{1,9})\]", number, text)


def _milliseconds(value: str | bytes) -> float | None:
    try:
        return max(0.0, int(value) / 1e3)
    except ValueError:
        return None


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
