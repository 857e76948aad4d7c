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


def test_violations_name_the_field_and_the_item() -> None:
    error = errors.from_rpc(with_details(grpc.StatusCode.INVALID_ARGUMENT, bad_request("items[2].grid.h")))
    assert isinstance(error, errors.InvalidItem)
    assert error.violations == (errors.Violation("items[2].grid.h", "bad"),)
    assert error.item == 2


def test_violations_of_a_part_name_the_position_in_the_whole_request() -> None:
    failed = with_details(grpc.StatusCode.INVALID_ARGUMENT, bad_request("items[1].pixels"))
    error = errors.from_rpc(failed, (4, 7))
    assert isinstance(error, errors.InvalidItem)
    assert error.violations[0].field == "items[7].pixels"
    assert error.item == 7


def test_violations_of_several_items_blame_none() -> None:
    failed = with_details(
        grpc.StatusCode.INVALID_ARGUMENT, bad_request("items[1].pixels"), bad_request("items[2].pixels")
    )
    assert errors.from_rpc(failed).item is None


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
