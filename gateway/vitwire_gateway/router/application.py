"""The ASGI application: what requests share, and the routes."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from vitwire import AsyncClient
from vitwire_gateway.images.encoding import Encoder, Recent
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

    async def readiness() -> dict[str, str]:
        probe = encoder.probe(_PROBE_SECONDS, needs_cache=settings.mode == "reference")
        of_encoder, of_engine = await asyncio.gather(probe, engine.probe())
        status = "ready" if of_encoder == "SERVING" and of_engine == "ok" else "not ready"
        return {"status": status, "encoder": of_encoder, "engine": of_engine}

    recent = Recent(readiness, _KEPT_SECONDS)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        async with AsyncExitStack() as stack:
            for close in (client.close, engine.close, fetcher.close, workers.close):
                stack.push_async_callback(close)
            yield

    async def health(_: Request) -> Response:
        report = await recent.get() | ({"status": "draining"} if admission.is_draining else {})
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
    app.state.admission = admission
    return app
