"""`vitwire sglang-encoder`."""

import asyncio
import ipaddress
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vitwire.cli._connection import (
    DEFAULT_TARGET,
    Ca,
    Cert,
    Connection,
    Key,
    Target,
    Timeout,
    Tls,
    Token,
    fail,
    reported,
    warn,
)
from vitwire.shared.extras import remedy

if TYPE_CHECKING:
    from vitwire_gateway.sglang.serving import Settings

_EXTRA = frozenset({"grpc_health", "httpcore2", "httpx2", "PIL", "smg_grpc_proto", "starlette", "uvicorn", "zmq"})
_MIB = 1 << 20


def sglang_encoder(
    *,
    target: Target = DEFAULT_TARGET,
    token: Token = None,
    tls: Tls = False,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    timeout: Timeout = 60.0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=-1, max=65535, help="HTTP port; 0 picks a free one, -1 disables it.")
    ] = 30100,
    grpc_port: Annotated[
        int, typer.Option(min=-1, max=65535, help="gRPC port; 0 picks a free one, -1 disables it.")
    ] = -1,
    register: Annotated[
        list[str] | None,
        typer.Option(help="Bootstrap server of an SGLang that has no --encoder-urls, http://host:8997; repeatable."),
    ] = None,
    advertise: Annotated[str | None, typer.Option(help="This encoder's URL for --register.")] = None,
    allow_image_host: Annotated[
        list[str] | None,
        typer.Option(help="Host that image URLs may name: host, host:port or *.domain; repeatable; else none."),
    ] = None,
    allow_image_network: Annotated[
        list[str] | None,
        typer.Option(help="Network (CIDR) that image hosts may be in although it is not public; repeatable."),
    ] = None,
    allow_image_folder: Annotated[
        list[Path] | None, typer.Option(help="Folder that image paths may be in; repeatable; else none.")
    ] = None,
    receiver_network: Annotated[
        list[str] | None,
        typer.Option(help="Network (CIDR) that embeddings may be sent to; repeatable; any if not set."),
    ] = None,
    output_type: Annotated[
        Literal["float32", "float16", "bfloat16"] | None, typer.Option(help="Type of the rows; else the server's.")
    ] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests in flight; more are refused.")] = 256,
    max_images: Annotated[int, typer.Option(min=1, help="Images per request.")] = 64,
    max_image_bytes: Annotated[int, typer.Option(min=1, help="Bytes of one image file.")] = 20 * _MIB,
    max_image_pixels: Annotated[int, typer.Option(min=1, help="Pixels of one image.")] = 50_000_000,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Bytes of a request.")] = 64 * _MIB,
    send_seconds: Annotated[
        float, typer.Option(min=0.1, help="Time for SGLang to register a receiver, and to take an embedding.")
    ] = 60.0,
    fetch_seconds: Annotated[float, typer.Option(min=0.1, help="Time to fetch one image URL.")] = 10.0,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Time for requests in flight to end after SIGTERM.")
    ] = 30.0,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Lowest level logged.")
    ] = "info",
) -> None:
    """Serve SGLang's encoder protocol: a --language-only SGLang uses Vitwire as its --encoder-urls."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("vitwire.sglang").setLevel(log_level.upper())
    connection = Connection(target, token, tls, ca, cert, key, timeout)
    with reported():
        try:
            from vitwire_gateway.openai.addresses import AllowedHost, parse_networks  # noqa: PLC0415
            from vitwire_gateway.openai.fetching import FetchLimits  # noqa: PLC0415
            from vitwire_gateway.sglang.http_service import BodyLimits  # noqa: PLC0415  # need the extra [sglang]
            from vitwire_gateway.sglang.media import MediaLimits  # noqa: PLC0415
            from vitwire_gateway.sglang.serving import Settings  # noqa: PLC0415
        except ImportError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in _EXTRA:
                raise
            fail(f"{missing} is not installed; {remedy('sglang')}")
        if port < 0 and grpc_port < 0:
            raise ValueError("--port and --grpc-port are both -1: set one")
        if register and not advertise:
            raise ValueError("--register needs --advertise, this encoder's URL for SGLang")
        settings = Settings(
            host=host,
            port=None if port < 0 else port,
            grpc_port=None if grpc_port < 0 else grpc_port,
            register=tuple(_urls(register or ())),
            advertise=advertise,
            receiver_networks=tuple(map(ipaddress.ip_network, receiver_network or ())),
            output_type=output_type,
            max_requests=max_requests,
            send_seconds=send_seconds,
            drain_seconds=drain_seconds,
            media=MediaLimits(max_images, max_image_bytes, max_image_pixels, tuple(allow_image_folder or ())),
            bodies=BodyLimits(max_body_bytes),
            fetching=FetchLimits(
                tuple(map(AllowedHost.parse, allow_image_host or ())),
                parse_networks(allow_image_network or ()),
                max_image_bytes,
                fetch_seconds,
            ),
        )
        asyncio.run(_serve(connection, settings))


async def _serve(connection: Connection, settings: "Settings") -> None:
    from vitwire_gateway.sglang.serving import serve  # noqa: PLC0415  # as above

    async with connection.async_client() as client:
        await serve(client, settings, warn)


def _urls(texts: "list[str] | tuple[()]") -> list[str]:
    for text in texts:
        if not text.startswith(("http://", "https://")):
            raise ValueError(f"--register {text!r} does not start with http:// or https://")
    return [text.rstrip("/") for text in texts]
