"""Statuses become the package's own exceptions, with their details."""

import pickle
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from fake_service import bad_request, retry_info
from vitwire import errors


class Rpc(grpc.RpcError):
    """A failed RPC of either kind of channel."""

    def __init__(self, code: grpc.StatusCode, metadata: Any = (), details: str | None = "as asked") -> None:
        self.parts = (code, metadata, details)

    def code(self) -> grpc.StatusCode:
        return self.parts[0]

    def trailing_metadata(self) -> Any:
        return self.parts[1]

    def details(self) -> str | None:
        return self.parts[2]


def with_details(code: grpc.StatusCode, *details: Any) -> Rpc:
    status = Status(code=code.value[0])
    for detail in details:
        status.details.add().Pack(detail)
    return Rpc(code, (("grpc-status-details-bin", status.SerializeToString()),))


KINDS = {
    "INVALID_ARGUMENT": errors.InvalidItem,
    "NOT_FOUND": errors.NotCached,
    "RESOURCE_EXHAUSTED": errors.Overloaded,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "UNAVAILABLE": errors.Unavailable,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.Unauthenticated,
}


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda code: code.name)
def test_every_status_has_its_kind(code: grpc.StatusCode) -> None:
    name = "UNAVAILABLE" if code is grpc.StatusCode.CANCELLED else code.name
    of_rpc, of_item = errors.from_rpc(Rpc(code)), errors.from_status(Status(code=code.value[0]), 3)
    assert (type(of_rpc), of_rpc.code) == (KINDS.get(name, errors.EncodeFailed), name)
    assert (type(of_item), of_item.code) == (KINDS.get(code.name, errors.EncodeFailed), code.name)
    assert str(of_rpc)
    assert str(of_item)


@pytest.mark.parametrize(
    ("fields", "positions", "first", "item"),
    [
        (["items[2].grid.h"], [], "items[2].grid.h", 2),
        (["items[1].pixels"], [(4, 7)], "items[7].pixels", 7),
        (["items[1].pixels", "items[2].pixels"], [], "items[1].pixels", None),
    ],
    ids=["one", "of a part, in the whole request", "of several items"],
)
def test_violations_name_the_field_and_the_item(
    fields: list[str], positions: list[tuple[int, ...]], first: str, item: int | None
) -> None:
    failed = with_details(grpc.StatusCode.INVALID_ARGUMENT, *map(bad_request, fields))
    error = errors.from_rpc(failed, *positions)
    assert isinstance(error, errors.InvalidItem)
    assert (error.violations[0], error.item) == (errors.Violation(first, "bad"), item)


def test_retry_after_comes_from_the_details_or_the_pushback() -> None:
    error = errors.from_rpc(with_details(grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorInfo(), retry_info(2, 500_000_000)))
    assert isinstance(error, errors.Overloaded)
    assert error.retry_after == 2.5
    for value, seconds in (("1500", 1.5), ("-1", 0.0), ("soon", None)):
        pushed = errors.from_rpc(Rpc(grpc.StatusCode.RESOURCE_EXHAUSTED, (("grpc-retry-pushback-ms", value),)))
        assert isinstance(pushed, errors.Overloaded)
        assert pushed.retry_after == seconds


def test_broken_details_do_not_hide_the_status() -> None:
    raw = Status(code=3)
    broken = raw.details.add()
    broken.Pack(bad_request("x"))
    broken.value = b"\xff\xff"
    for status in (b"\xff", raw.SerializeToString()):
        error = errors.from_rpc(Rpc(grpc.StatusCode.INVALID_ARGUMENT, (("grpc-status-details-bin", status),), None))
        assert isinstance(error, errors.InvalidItem)
        assert error.violations == ()


def test_an_unknown_code_of_an_item_is_a_failure() -> None:
    error = errors.from_status(Status(code=99, message="?"), 1)
    assert isinstance(error, errors.EncodeFailed)
    assert (error.code, error.item) == ("UNKNOWN", 1)


@pytest.mark.parametrize("kind", [errors.VitwireError, *dict.fromkeys(KINDS.values()), errors.EncodeFailed])
def test_errors_survive_pickling(kind: type[errors.VitwireError]) -> None:
    error = kind("text", code="X", item=4)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), again.code, again.item) == ("text", "X", 4)
    assert kind("text").code == kind.default_code
