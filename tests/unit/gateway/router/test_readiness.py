"""What `/health` answers, and what the log says of it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from fake_service import Fake, Running, abort, serving
from vitwire import AsyncClient
from vitwire.v1 import encoder_pb2 as pb
from vitwire_gateway.gateway_settings import RouterSettings
from vitwire_gateway.images.encoding import Encoder
from vitwire_gateway.router.llm_engine import Engine
from vitwire_gateway.router.readiness import Readiness
from vitwire_gateway.workers import Workers

READY, ALONE = {"status": "ready", "encoder": "SERVING", "engine": "ok"}, {"status": "ready", "encoder": "SERVING"}


class Pooling(Fake):
    def __init__(self, pooling: str) -> None:
        super().__init__()
        self._pooling = pooling

    def GetModel(self, request, context):  # noqa: N802, ANN001, ANN201
        message = super().GetModel(request, context)
        message.pooling = pb.Pooling.Value(f"POOLING_{self._pooling.upper()}")
        return message


@asynccontextmanager
async def reporting(running: Running, **settings: Any) -> AsyncIterator[Callable[[], Any]]:
    """Calls that probe anew each time."""
    found = RouterSettings(target=running.target, **settings)
    engine = Engine(found)
    workers = Workers("vitwire_gateway.images.image_files", 1 << 20)
    async with AsyncClient(running.target, max_retries=0) as client:
        readiness = Readiness(found, Encoder(client, workers, 1000, max_encoding=2), engine)
        readiness._recent._seconds = 0.0
        yield readiness.report
    await engine.close()
    await workers.close()


@asynccontextmanager
async def answering(*paths: str) -> AsyncIterator[str]:
    """The URL of an engine that has these paths."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        writer.write(f"HTTP/1.1 {200 if path in paths else 404} x\r\ncontent-length: 0\r\n\r\n".encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@pytest.mark.parametrize(("policy", "status"), [("error", "not ready"), ("engine", "ready")])
async def test_changes_are_logged_once(policy: str, status: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vitwire.router")
    async with answering("/health") as url:
        with serving(Fake()) as running:
            async with reporting(running, engine_url=url, on_encoder_failure=policy) as report:
                assert await report() == READY
                assert caplog.messages == []
                running.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
                for _ in range(3):
                    assert await report() == READY | {"status": status, "encoder": "NOT_SERVING"}
                running.health.set("", health_pb2.HealthCheckResponse.SERVING)
                for _ in range(3):
                    assert await report() == READY
    assert caplog.messages == [
        f"{status}{', the engine encodes images' * (status == 'ready')}: encoder: NOT_SERVING, engine: ok",
        "ready again: encoder: SERVING, engine: ok",
    ]


@pytest.mark.parametrize("alone", [False, True])
async def test_a_refused_token(*, alone: bool) -> None:
    fake = Fake(before=lambda context: abort(context, grpc.StatusCode.UNAUTHENTICATED))
    with serving(fake) as running:
        policy = {"no_engine": True} if alone else {"on_encoder_failure": "engine"}
        async with answering("/health") as url, reporting(running, engine_url=url, **policy) as report:
            refused = "the encoder requires a token: set --token or VITWIRE_ROUTER_TOKEN"
            assert await report() == (ALONE if alone else READY) | {"status": "not ready", "encoder": refused}


@pytest.mark.parametrize(
    ("path", "engine"), [("/v1/models", "ok"), ("", "not asked"), ("/health", "the engine's /health returned 404")]
)
async def test_the_engine_is_asked_at_its_path(path: str, engine: str) -> None:
    with serving(Fake()) as running:
        async with (
            answering("/v1/models") as url,
            reporting(running, engine_url=url, engine_health_path=path) as report,
        ):
            found = await report()
    status = "not ready" if path == "/health" else "ready"
    assert found == {"status": status, "encoder": "SERVING", "engine": engine}


async def test_an_engine_that_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with serving(Fake()) as running:
        async with reporting(running, engine_url=f"http://127.0.0.1:{port}/base") as report:
            found = (await report())["engine"]
    assert found.startswith(f"the engine at 127.0.0.1:{port} cannot be reached: ")


@pytest.mark.parametrize(("pooling", "alone", "warned"), [("none", True, 1), ("none", False, 0), ("cls", True, 0)])
async def test_an_encoder_that_pools_nothing(
    pooling: str, warned: int, caplog: pytest.LogCaptureFixture, *, alone: bool
) -> None:
    with serving(Pooling(pooling)) as running:
        async with reporting(running, no_engine=alone, engine_health_path="") as report:
            for _ in range(3):
                assert (await report())["status"] == "ready"
    assert [each.startswith("the encoder pools no vectors") for each in caplog.messages] == [True] * warned
