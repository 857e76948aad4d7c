"""The process of `vitwire sglang-encoder`: an adapter behind an HTTP and a gRPC port."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

import uvicorn

from vitwire import AsyncClient, DType, VitwireError
from vitwire_gateway.openai.connections import limited_to
from vitwire_gateway.openai.encoding import Encoder
from vitwire_gateway.openai.errors import ApiError
from vitwire_gateway.openai.fetching import Fetcher, FetchLimits
from vitwire_gateway.openai.shares import Budget
from vitwire_gateway.openai.workers import Workers, memory_for
from vitwire_gateway.sglang.adapter import Adapter, Limits
from vitwire_gateway.sglang.grpc_service import grpc_server
from vitwire_gateway.sglang.http_service import BodyLimits, http_app
from vitwire_gateway.sglang.media import Fetch, Media, MediaLimits
from vitwire_gateway.sglang.parts import Refused
from vitwire_gateway.sglang.pushing import Network, Pusher
from vitwire_gateway.sglang.receivers import Receivers
from vitwire_gateway.sglang.registering import registered

logger = logging.getLogger("vitwire.sglang")

_BACKLOG = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to serve SGLang."""

    host: str = "127.0.0.1"
    port: int | None = 30100
    """HTTP; None for none, 0 for a free one."""
    grpc_port: int | None = None
    register: tuple[str, ...] = ()
    """SGLang's bootstrap servers."""
    advertise: str | None = None
    """This encoder's URL for them."""
    receiver_networks: tuple[Network, ...] = ()
    output_type: DType | None = None
    max_requests: int = 256
    send_seconds: float = 60.0
    drain_seconds: float = 30.0
    media: MediaLimits = field(default_factory=MediaLimits)
    bodies: BodyLimits = field(default_factory=BodyLimits)
    fetching: FetchLimits | None = None


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers; `serve` has them for both servers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(client: AsyncClient, settings: Settings, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP; `announce` gets a line with the addresses.

    Raises OSError for a taken port.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    fetcher = Fetcher(settings.fetching) if settings.fetching and settings.fetching.hosts else None
    media = Media(settings.media, _fetch(fetcher) if fetcher else None)
    pusher = Pusher(settings.send_seconds, settings.receiver_networks)
    limits = Limits(requests=settings.max_requests)
    pixels = settings.media.max_image_pixels
    workers = Workers("vitwire_gateway.sglang.reading", memory_for(pixels, settings.bodies.each))
    encoder = Encoder.of(client, workers, max_pixels=pixels, max_encoding=limits.encoding)
    receivers = Receivers(settings.send_seconds)
    adapter = Adapter(client, encoder, media, receivers, pusher, limits=limits, output_type=settings.output_type)
    async with AsyncExitStack() as stack:
        stack.callback(media.close)
        stack.callback(encoder.close)
        stack.push_async_callback(workers.close)
        if fetcher:
            stack.push_async_callback(fetcher.close)
        stack.callback(pusher.close)
        stack.push_async_callback(adapter.close)
        addresses = []
        if settings.grpc_port is not None:
            port = await _serve_grpc(adapter, workers, settings, stack)
            addresses.append(f"grpc://{_bracketed(settings.host)}:{port}")
        if settings.port is not None:
            port = await _serve_http(adapter, workers, settings, stack)
            addresses.append(f"http://{_bracketed(settings.host)}:{port}")
        await stack.enter_async_context(registered(settings.register, settings.advertise or addresses[-1]))
        announce(f"listening on {', '.join(addresses)}")
        await _log_model(client)
        await stop.wait()


def _fetch(fetcher: Fetcher) -> Fetch:
    """The router's fetching, with the errors of this package."""

    async def fetch(url: str) -> bytes:
        try:
            return await fetcher.fetch(url, "url")
        except ApiError as error:
            raise Refused(error.message, HTTPStatus(error.status)) from error

    return fetch


async def _serve_grpc(adapter: Adapter, workers: Workers, settings: Settings, stack: AsyncExitStack) -> int:
    server = grpc_server(adapter, workers, max_body_bytes=settings.bodies.each, max_requests=4 * settings.max_requests)
    try:
        port = server.add_insecure_port(f"{_bracketed(settings.host)}:{settings.grpc_port}")
    except RuntimeError as error:  # gRPC's only sign of it
        raise OSError(f"gRPC cannot listen on {settings.host}:{settings.grpc_port}") from error
    await server.start()
    stack.push_async_callback(server.stop, settings.drain_seconds)
    return int(port)


async def _serve_http(adapter: Adapter, workers: Workers, settings: Settings, stack: AsyncExitStack) -> int:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.create_server((settings.host, settings.port or 0), family=family, backlog=_BACKLOG)
    bodies = Budget(settings.bodies.together)
    server = _HttpServer(
        uvicorn.Config(
            http_app(adapter, workers, bodies, settings.bodies),
            http=limited_to(settings.send_seconds),
            log_config=None,
            access_log=False,
            lifespan="off",
            limit_concurrency=4 * settings.max_requests,
            timeout_graceful_shutdown=max(1, int(settings.drain_seconds)),
            server_header=False,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))

    async def end() -> None:
        bodies.drain()
        server.should_exit = True
        await task

    stack.push_async_callback(end)
    return int(listener.getsockname()[1])


async def _log_model(client: AsyncClient) -> None:
    """Log what is served, so that a language server of another model is noticed."""
    try:
        model = await client.model()
    except VitwireError as error:
        logger.warning("Vitwire does not answer yet: %s", error)
        return
    width = model.embedding_width
    logger.info("serving %s (%s): rows of %d, %s", model.model_id, model.model_type, width, model.dtype)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
