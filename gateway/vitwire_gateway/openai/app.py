"""The ASGI application: what requests share, and the routes."""

import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vitwire import AsyncClient
from vitwire._transport.channel import checked_target
from vitwire._transport.context import checked_token
from vitwire_gateway.openai.addresses import AllowedHost, parse_networks
from vitwire_gateway.openai.admission import Admission
from vitwire_gateway.openai.dialects import Dialect, dialect_of
from vitwire_gateway.openai.encoding import Encoder
from vitwire_gateway.openai.endpoint import Endpoint
from vitwire_gateway.openai.fetching import Fetcher, FetchLimits
from vitwire_gateway.openai.images import Images
from vitwire_gateway.openai.keys import ApiKeys, read_keys
from vitwire_gateway.openai.metrics import Metrics
from vitwire_gateway.openai.readiness import Readiness
from vitwire_gateway.openai.routing import Router
from vitwire_gateway.openai.settings import Settings
from vitwire_gateway.openai.upstream import Engine, trusting
from vitwire_gateway.openai.workers import Workers, memory_for

CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What settings name, read and checked before the router listens."""

    settings: Settings
    dialect: Dialect
    fetching: FetchLimits
    keys: ApiKeys | None
    engine_key: str | None
    engine_tls: ssl.SSLContext
    credentials: grpc.ChannelCredentials | None

    @classmethod
    def of(cls, settings: Settings) -> "Prepared":
        """Raises ValueError for settings, and OSError for files, that cannot be used."""
        checked_target(settings.target)
        checked_token(settings.token)
        return cls(
            settings,
            dialect_of(settings),
            FetchLimits(
                tuple(map(AllowedHost.parse, settings.allow_image_host)),
                parse_networks(settings.allow_image_network),
                settings.max_image_bytes,
                settings.fetch_seconds,
            ),
            ApiKeys(settings.api_keys_file) if settings.api_keys_file else None,
            read_keys(settings.engine_api_key_file)[0] if settings.engine_api_key_file else None,
            trusting(settings.engine_ca),
            _credentials(settings),
        )


def application(prepared: Prepared) -> Starlette:
    """The application; its connections are made when the server starts it, in the server's event loop."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        async with AsyncExitStack() as stack:
            await _start(app, prepared, stack)
            yield

    app = Starlette(lifespan=lifespan)
    app.router.redirect_slashes = False
    return app


async def _start(app: Starlette, prepared: Prepared, stack: AsyncExitStack) -> None:
    settings, metrics = prepared.settings, Metrics()
    client = AsyncClient(
        settings.target,
        tls=prepared.credentials,
        token=settings.token,
        max_retries=settings.encoder_retries,
        affinity=True,  # an image goes to the replica that has its rows cached, where others fetch them too
    )
    stack.push_async_callback(client.close)
    engine = Engine(settings, prepared.engine_tls)
    stack.push_async_callback(engine.close)
    fetcher = Fetcher(prepared.fetching)
    stack.push_async_callback(fetcher.close)
    workers = Workers("vitwire_gateway.openai.reading", memory_for(settings.max_image_pixels, settings.max_body_bytes))
    stack.push_async_callback(workers.close)
    encoder = Encoder.of(
        client,
        workers,
        max_pixels=settings.max_image_pixels,
        max_encoding=settings.max_encoding,
        seconds=settings.encoder_wait,
    )
    stack.callback(encoder.close)
    images = Images(encoder, fetcher, prepared.dialect, metrics, settings.encode_seconds, settings.encoder_wait)
    own_keys = bool(prepared.keys or prepared.engine_key)
    router = Router(settings, metrics, engine, images, own_keys, prepared.engine_key)
    admission = Admission(settings.max_requests, settings.max_buffered_bytes, metrics)
    shared = (admission, prepared.keys, metrics, settings)
    app.state.admission = admission
    app.state.readiness = Readiness(client, engine, encoder.description if settings.mode == "reference" else None)
    app.state.metrics = metrics
    app.router.routes[:] = [
        Route("/health", _health),
        Route("/healthz", _health),
        Route("/livez", _alive),
        Route("/metrics", _metrics),
        Route(CHAT, Endpoint("chat", router.chat, *shared)),
        Route("/{path:path}", Endpoint("proxied", router.proxied, *shared)),
    ]


async def _health(request: Request) -> Response:
    report = await request.app.state.readiness.report()
    return Response(json.dumps(report), 200 if report["status"] == "ready" else 503, media_type="application/json")


async def _alive(_: Request) -> Response:
    return Response("alive")


async def _metrics(request: Request) -> Response:
    return Response(request.app.state.metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})


def _credentials(settings: Settings) -> grpc.ChannelCredentials | None:
    if not (settings.tls or settings.ca or settings.cert):
        return None
    files = (settings.ca, settings.key, settings.cert)
    ca, key, cert = (path.read_bytes() if path else None for path in files)
    return grpc.ssl_channel_credentials(ca, key, cert)
