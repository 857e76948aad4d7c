"""The ASGI application: what requests share, and the routes."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from vitwire import AsyncClient, VitwireError
from vitwire_gateway.images.encoding import Description, Encoder
from vitwire_gateway.images.fetching import Fetcher
from vitwire_gateway.metrics import Metrics
from vitwire_gateway.openai.parts import Images, dialect_of
from vitwire_gateway.router.admission import Admission, read_keys
from vitwire_gateway.router.engine import Engine
from vitwire_gateway.router.exchange import Endpoint
from vitwire_gateway.router.routing import Router
from vitwire_gateway.settings import RouterSettings
from vitwire_gateway.workers import Workers, memory_for

CHAT = "/v1/chat/completions"
_PROBE_SECONDS = 2.0
_KEPT_SECONDS = 1.0
"""For how long an answer is kept, so that probes of many balancers cost one."""


@dataclass(slots=True)
class Readiness:
    """Asks encoder and engine whether requests can be answered, at most once a second."""

    client: AsyncClient
    engine: Engine
    storing: Description | None = None
    """Of an encoder whose embeddings the engine fetches, so that it must keep them; None if requests carry them."""
    is_draining: bool = False
    _until: float = 0.0
    _answer: dict[str, str] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def report(self) -> dict[str, str]:
        """`status` is `ready`, `not ready` or `draining`; the rest says what encoder and engine reported."""
        async with self._lock:
            if time.monotonic() >= self._until:
                encoder, engine = await asyncio.gather(self._encoder(), self.engine.probe())
                ready = encoder == "SERVING" and engine == "ok"
                self._answer = {"status": "ready" if ready else "not ready", "encoder": encoder, "engine": engine}
                self._until = time.monotonic() + _KEPT_SECONDS
        return self._answer | ({"status": "draining"} if self.is_draining else {})

    async def _encoder(self) -> str:
        try:
            status = await self.client.health(timeout=_PROBE_SECONDS)
            if status == "SERVING" and self.storing and not (await self.storing.current()).limits.cached_bytes:
                return "SERVING without --cache-bytes, which --mode reference needs"
            return status
        except VitwireError as error:
            return str(error)


def application(settings: RouterSettings) -> Starlette:
    """The application. Raises ValueError for settings, and OSError for files, that cannot be used."""
    metrics = Metrics()
    client = AsyncClient(
        settings.target,
        tls=settings.credentials(),
        token=settings.token,
        max_retries=settings.encoder_retries,
        affinity=True,  # an image goes to the replica that has it cached, where others fetch its embedding too
    )
    engine, fetcher = Engine(settings), Fetcher(settings)
    memory = memory_for(settings.max_image_pixels, settings.max_body_bytes)
    workers = Workers("vitwire_gateway.openai.chat_reading", memory)
    encoder = Encoder(client, workers, settings.max_image_pixels, settings.max_encoding, settings.encoder_wait)
    images = Images(settings, encoder, fetcher, dialect_of(settings), metrics)
    admission = Admission(settings, metrics)
    engine_key = read_keys(settings.engine_api_key_file)[0] if settings.engine_api_key_file else None
    router = Router(settings, metrics, engine, images, bool(admission.keys or engine_key), engine_key)
    readiness = Readiness(client, engine, encoder.description if settings.mode == "reference" else None)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        async with AsyncExitStack() as stack:
            for close in (client.close, engine.close, fetcher.close, workers.close):
                stack.push_async_callback(close)
            yield

    async def health(_: Request) -> Response:
        report = await readiness.report()
        return Response(json.dumps(report), 200 if report["status"] == "ready" else 503, media_type="application/json")

    async def alive(_: Request) -> Response:
        return PlainTextResponse("alive")

    async def page(_: Request) -> Response:
        return Response(metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})

    routes = [
        Route("/health", health),
        Route("/healthz", health),
        Route("/livez", alive),
        Route("/metrics", page),
        Route(CHAT, Endpoint("chat", router.chat, settings, admission, metrics)),
        Route("/{path:path}", Endpoint("proxied", router.proxied, settings, admission, metrics)),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.readiness, app.state.admission = readiness, admission
    return app
