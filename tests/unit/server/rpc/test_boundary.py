"""The boundary of every RPC."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from readings import Readings
from vitwire_server.core.errors import Unavailable
from vitwire_server.observe.metrics import Metrics
from vitwire_server.rpc.boundary import RpcBoundary, cancellation
from vitwire_server.rpc.credentials import IS_REFUSED


class _GoneClient:
    """The context of an RPC whose stream was removed just before its status was sent."""

    def set_trailing_metadata(self, *_: Any) -> None:
        pass

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> None:
        return None

    def peer(self) -> str:
        return "unix:"

    def details(self) -> str:
        return ""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAUTHENTICATED

    async def abort(self, *_: Any) -> None:
        raise RuntimeError("ExecuteBatchError")


async def _refuse(_: object, __: object) -> None:
    raise Unavailable("the model is still loading")


def test_a_client_that_left_before_its_status_was_sent_raises_no_error() -> None:
    """gRPC would log any other error with a traceback."""
    metrics = Metrics()
    boundary = RpcBoundary("vitwire.v1.EncoderService", metrics.rpc, 1.0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(boundary.around(_refuse, "Encode", {})(None, cast("Any", _GoneClient())))
    requests = Readings(metrics.registry).by("vitwire_requests_total", "code", method="Encode")
    assert requests == {"UNAVAILABLE": 1}


def test_an_rpc_without_a_valid_token_is_not_counted() -> None:
    metrics = Metrics()
    boundary = RpcBoundary("vitwire.v1.EncoderService", metrics.rpc, 1.0)

    async def refuse(_: object, __: object) -> None:
        assert boundary._active == 0
        raise grpc.aio.AbortError

    async def refused() -> None:
        IS_REFUSED.set(True)
        await boundary.around(refuse, "Encode", {})(None, cast("Any", _GoneClient()))

    with pytest.raises(grpc.aio.AbortError):
        asyncio.run(refused())
    assert not Readings(metrics.registry).by("vitwire_requests_total", "code", method="Encode")


@pytest.mark.parametrize(
    ("remaining", "code"),
    [(-0.01, "DEADLINE_EXCEEDED"), (0.05, "DEADLINE_EXCEEDED"), (5, "CANCELLED"), (None, "CANCELLED")],
)
def test_a_deadline_that_passed_at_the_client_first_is_no_cancellation(remaining: float | None, code: str) -> None:
    context = cast("Any", SimpleNamespace(time_remaining=lambda: remaining))
    assert cancellation(context) is grpc.StatusCode[code]
