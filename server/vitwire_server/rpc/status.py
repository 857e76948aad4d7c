"""One table from the server's errors to gRPC statuses and their details."""

from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from vitwire_server.core import errors

_CODES: tuple[tuple[type[errors.EncoderError], StatusCode], ...] = (
    (errors.InvalidRequest, StatusCode.INVALID_ARGUMENT),
    (errors.InvalidTensors, StatusCode.INVALID_ARGUMENT),
    (errors.Overloaded, StatusCode.RESOURCE_EXHAUSTED),
    (errors.DeadlineExceeded, StatusCode.DEADLINE_EXCEEDED),
    (errors.NotCached, StatusCode.NOT_FOUND),
    (errors.Unavailable, StatusCode.UNAVAILABLE),
    (errors.OutOfMemory, StatusCode.RESOURCE_EXHAUSTED),
    (errors.EncodeFailed, StatusCode.INTERNAL),
)

_WORST_FIRST = (
    StatusCode.INTERNAL,
    StatusCode.RESOURCE_EXHAUSTED,
    StatusCode.UNAVAILABLE,
    StatusCode.DEADLINE_EXCEEDED,
    StatusCode.INVALID_ARGUMENT,
    StatusCode.NOT_FOUND,
    StatusCode.OK,
)
"""An RPC whose items ended with several codes is counted under the first of these."""

_MOST_CHARACTERS = 300
_MOST_VIOLATIONS = 8


def code_of(error: errors.EncoderError) -> StatusCode:
    return next(code for kind, code in _CODES if isinstance(error, kind))


def worst_of(one: StatusCode, other: StatusCode) -> StatusCode:
    """The more serious code of two."""
    return min(one, other, key=_WORST_FIRST.index)


def message_of(error: errors.EncoderError) -> str:
    """The error's message, shortened."""
    text = str(error)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


def status_of(error: errors.EncoderError) -> Status:
    """The error as google.rpc.Status, with its details.

    It must fit into trailing metadata, which gRPC limits to 8 KiB.
    """
    number: int = code_of(error).value[0]
    status = Status(code=number, message=message_of(error))
    if isinstance(error, errors.InvalidRequest):
        violations = [
            BadRequest.FieldViolation(field=violation.field, description=violation.reason[:_MOST_CHARACTERS])
            for violation in error.violations[:_MOST_VIOLATIONS]
        ]
        status.details.add().Pack(BadRequest(field_violations=violations))
    elif isinstance(error, errors.Overloaded):
        status.details.add().Pack(RetryInfo(retry_delay=duration(error.retry_seconds)))
    return status


def trailers_of(error: errors.EncoderError) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata for an RPC that ends with `error`."""
    trailers: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", status_of(error).SerializeToString())]
    if isinstance(error, errors.Overloaded):
        trailers.append(("grpc-retry-pushback-ms", str(round(error.retry_seconds * 1000))))
    return tuple(trailers)


def duration(seconds: float) -> Duration:
    result = Duration()
    result.FromNanoseconds(round(seconds * 1e9))
    return result
