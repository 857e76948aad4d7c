"""The process of the router: its ASGI application, logs, signals, listening and draining."""

import asyncio
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

import httpx2
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from vitwire import AsyncClient
from vitwire.shared.garbage import exempt_loaded
from vitwire_children import heartbeat
from vitwire_children.confine import be_private
from vitwire_gateway.gateway_settings import RouterSettings
from vitwire_gateway.images.encoding import Encoder
from vitwire_gateway.images.fetching import Fetcher
from vitwire_gateway.listening import configured, listening
from vitwire_gateway.metrics import Metrics
from vitwire_gateway.requests.content_parts import Images
from vitwire_gateway.requests.engine_parts import part_of
from vitwire_gateway.router.admission import Admission, Ticket, content_key_of, engine_key_of
from vitwire_gateway.router.embedding_apis import embedding_apis
from vitwire_gateway.router.endpoint import Endpoint, Exchange, RouteName
from vitwire_gateway.router.llm_engine import Engine
from vitwire_gateway.router.readiness import Readiness
from vitwire_gateway.router.routing import Router
from vitwire_gateway.workers import Workers, memory_for

logger = logging.getLogger("vitwire.router")

_CHAT = "/v1/chat/completions"
_OPENAPI = Path(__file__).parents[1] / "embeddings" / "openapi.json"
_END_SECONDS = 1.0
"""After the second signal, for requests to be cut off and connections to be closed."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than callers keep idle connections, so that they close them, never in the middle of a request."""


def _client(settings: RouterSettings, *, is_child: bool) -> AsyncClient:
    """The encoder's client. is_child: of the server that it calls. Raises as `_application`."""
    return AsyncClient(
        settings.target,
        tls=settings.encoder_tls(),
        token=settings.token,
        timeout=settings.encoder_wait,
        max_retries=settings.encoder_retries,
        affinity=True,  # an image goes to the replica that has it cached, where others fetch its embedding too
        # A server that drains is not ready, and lets its front end drain first.
        channel_options={"grpc.inhibit_health_checking": 1} if is_child else None,
    )


def _application(settings: RouterSettings, metrics: Metrics, admission: Admission) -> Starlette:
    """The application. Raises ValueError for settings, and OSError for files, that cannot be used."""
    supervisor = heartbeat.inherited()
    client = _client(settings, is_child=supervisor is not None)
    engine, fetcher = Engine(settings), Fetcher(settings)
    memory = memory_for(settings.max_image_pixels, settings.max_body_bytes)
    workers = Workers("vitwire_gateway.router.routing", memory)
    encoder = Encoder(client, workers, settings.max_image_pixels, settings.max_encoding, content_key_of(settings))
    images = Images(settings, encoder, fetcher, metrics)
    engine_key = engine_key_of(settings)
    router = Router(settings, metrics, engine, images, bool(admission.keys or engine_key), engine_key)

    readiness = Readiness(settings, encoder, engine)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        async with AsyncExitStack() as stack:
            for close in (client.close, engine.close, fetcher.close, workers.close):
                stack.push_async_callback(close)
            # The report logs what is not ready; a server, which starts its front end first, says that itself.
            work = readiness.report() if supervisor is None else heartbeat.beat(supervisor)
            stack.callback(asyncio.ensure_future(work).cancel)
            exempt_loaded(logger)
            yield

    async def health(_: Request) -> Response:
        report = await readiness.report() | ({"status": "draining"} if admission.is_draining else {})
        return Response(json.dumps(report), 200 if report["status"] == "ready" else 503, media_type="application/json")

    async def alive(_: Request) -> Response:
        return PlainTextResponse("alive")

    async def page(_: Request) -> Response:
        return Response(metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})

    def endpoint(route: RouteName, answer: Callable[[Exchange, Ticket], Awaitable[None]]) -> Endpoint:
        return Endpoint(route, answer, settings, admission, metrics)

    if settings.no_engine:
        models = endpoint("embeddings", router.models)
        others = [Route("/openapi.json", Response(_OPENAPI.read_bytes(), media_type="application/json"))]
        others += [Route(path, models) for path in ("/v1/models", "/v1/models/{model:path}")]
    else:
        others = [Route(_CHAT, endpoint("chat", partial(router.chat, part_of(settings.mode))))]
    embeddings = embedding_apis(has_engine=not settings.no_engine)
    routes = [
        Route("/health", health),
        Route("/healthz", health),
        Route("/livez", alive),
        Route("/metrics", page),
        *others,
        *(Route(api.path, endpoint("embeddings", partial(router.embeddings, api))) for api in embeddings),
        Route("/{path:path}", endpoint("proxied", router.proxied)),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.router.default = routes[-1].app  # for what has no path, as `GET http://host/v1/models`
    return app


class _Server(uvicorn.Server):
    """Announces its port.

    At SIGTERM, SIGINT or SIGHUP it reports that it is not ready, then drains; the second ends it.
    """

    def __init__(self, config: uvicorn.Config, admission: Admission, lame_duck_seconds: float) -> None:
        super().__init__(config)
        self._admission = admission
        self._lame_duck_seconds = lame_duck_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ending = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            self._loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        logger.info("listening on %s:%d", host, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # the base's signature
        if self._loop is None or self._is_ending:
            self.should_exit = self.force_exit = True
            return
        self._is_ending = True
        self._loop.call_soon_threadsafe(self._drain)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if not self.force_exit:
            return
        tasks = list(self.server_state.tasks)  # uvicorn leaves them alone then, and does not end the application
        for connection in self.server_state.connections:
            connection.transport.abort()  # else uvicorn logs an error for each
        for task in tasks:
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await asyncio.gather(*tasks, return_exceptions=True)
                await self.lifespan.shutdown()

    def _hang_up(self) -> None:
        """The terminal was closed, which may come as several signals."""
        if not self._is_ending:
            self.handle_exit(signal.SIGHUP, None)

    def _drain(self) -> None:
        logger.info("draining")
        self._admission.is_draining = True
        asyncio.get_running_loop().call_later(self._lame_duck_seconds, self._stop)

    def _stop(self) -> None:
        self._admission.bytes.drain()
        self.should_exit = True


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def serve(settings: RouterSettings) -> None:
    """Serve until a signal. Raises ValueError or OSError for settings that cannot be used."""
    be_private()
    handler = logging.StreamHandler(sys.stderr)
    form = "%(asctime)s %(levelname)s %(message)s"
    handler.setFormatter(_JsonLines() if settings.log_format == "json" else logging.Formatter(form))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logger.setLevel(settings.log_level.upper())
    metrics = Metrics()
    admission = Admission(settings, metrics)
    at = httpx2.URL(settings.engine_url).netloc.decode()  # without a password
    engine = f"engine at {at}, mode {settings.mode}"
    logger.info("encoder %s, %s", settings.target, "no engine" if settings.no_engine else engine)
    config = configured(
        _application(settings, metrics, admission),
        settings.stall_seconds,
        settings.drain_seconds,
        lifespan="on",
        h11_max_incomplete_event_size=settings.max_header_bytes,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
    )
    with listening(settings.host, settings.port) as listener:
        _Server(config, admission, settings.lame_duck_seconds).run(sockets=[listener])
    logger.info("ended")
