"""The process of `vitwire sglang-encoder`: an adapter behind an HTTP port."""

import asyncio
import ipaddress
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

import uvicorn

from vitwire import AsyncClient, VitwireError
from vitwire.shared.fairness.budgets import Budget
from vitwire.shared.garbage import exempt_loaded
from vitwire_children.confine import be_private
from vitwire_gateway.gateway_settings import SglangSettings
from vitwire_gateway.images.encoding import Encoder
from vitwire_gateway.images.fetching import Fetcher
from vitwire_gateway.listening import configured, listening
from vitwire_gateway.sglang.adapter import MAX_ENCODING, Adapter
from vitwire_gateway.sglang.media import Media
from vitwire_gateway.sglang.receiver_messages import Pusher
from vitwire_gateway.sglang.receiver_requests import refused
from vitwire_gateway.sglang.services import http_app
from vitwire_gateway.workers import Workers, memory_for

logger = logging.getLogger("vitwire.sglang")

_BODIES = 2 << 30
"""Bytes of all bodies held at a time."""


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers; `_serve` has them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(settings: SglangSettings) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. Raises OSError for a taken port, or ValueError for wrong settings."""
    be_private()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logger.setLevel(settings.log_level.upper())
    asyncio.run(_serve(settings))


async def _serve(settings: SglangSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    pixels = settings.max_image_pixels
    workers = Workers("vitwire_gateway.sglang.services", memory_for(pixels, settings.max_body_bytes))
    fetcher = Fetcher(settings)
    media = Media(settings.max_image_bytes, fetcher)
    pusher = Pusher(settings.send_seconds, tuple(map(ipaddress.ip_network, settings.receiver_network)))
    async with AsyncExitStack() as stack:
        stack.callback(pusher.close)
        client = AsyncClient(
            settings.target,
            tls=settings.encoder_tls(),
            token=settings.token,
            timeout=settings.timeout,
            output_type=settings.output_type,
        )
        await stack.enter_async_context(client)
        adapter = Adapter(settings, Encoder(client, workers, pixels, MAX_ENCODING), media, pusher)
        for close in (fetcher.close, workers.close, adapter.close):
            stack.push_async_callback(close)
        exempt_loaded(logger)
        listener = listening(settings.host, settings.port)
        bodies = Budget(_BODIES, lambda: refused("the requests in flight are too large together", 503))
        app = http_app(adapter, workers, bodies, settings)
        limit, seconds = 4 * settings.max_requests, max(1.0, settings.drain_seconds)
        server = _HttpServer(configured(app, settings.send_seconds, seconds, lifespan="off", limit_concurrency=limit))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        print(f"vitwire: listening on http://{host}:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
        try:
            model = await client.model()
            width = model.embedding_width  # so that a language server of another model is noticed
            logger.info("serving %s (%s): vectors of %d, %s", model.model_id, model.model_type, width, model.dtype)
        except VitwireError as error:
            logger.warning("Vitwire does not answer yet: %s", error)
        await stop.wait()
        bodies.drain()
        server.should_exit = True
        await serving
