"""Settings of both commands: one table for flags, environment variables and help."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple
from urllib.parse import urlsplit

import grpc

from vitwire.shared.named_files import tls_of

Engine = Literal["vllm", "sglang"]
Mode = Literal["inline", "reference"]
OnFailure = Literal["error", "engine"]
Clips = Literal["encode", "engine"]
MIB = 1 << 20
_MAX_PORT = 65535
_PATH = re.compile(r"(/[!-~]*)?")
_COLLECTOR = re.compile(r"(https?://)?[^/\s]+/?")


class Flag(NamedTuple):
    """The help of a setting, its lowest and its highest value."""

    help: str
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Settings of both commands; every field is a flag. Raises ValueError if invalid."""

    prefix: ClassVar[str] = "VITWIRE_"
    """Of environment variables."""

    host: Annotated[str, Flag("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Flag("port to listen on; 0 picks a free one and prints it", 0, _MAX_PORT)] = 8080
    target: Annotated[str, Flag("the encoder: host:port, dns:///name:port or unix:path; without a port, 50051")] = (
        "127.0.0.1:50051"
    )
    token: Annotated[str | None, Flag("bearer token for the encoder")] = None
    tls: Annotated[bool, Flag("use TLS to the encoder, with the system's root certificates unless --ca is set")] = False
    ca: Annotated[Path | None, Flag("root certificates of the encoder, PEM; implies --tls")] = None
    cert: Annotated[Path | None, Flag("client certificate for the encoder, PEM, for mutual TLS")] = None
    key: Annotated[Path | None, Flag("private key of the client certificate, PEM")] = None
    allow_image_host: Annotated[
        tuple[str, ...],
        Flag("host that URLs may name: host, host:port or *.domain; repeatable; without it URLs are refused"),
    ] = ()
    allow_image_network: Annotated[
        tuple[str, ...], Flag("non-public network (CIDR) that these hosts may be in; repeatable")
    ] = ()
    fetch_seconds: Annotated[float, Flag("seconds to fetch one URL, with redirects", 0.001)] = 10.0
    max_requests: Annotated[
        int, Flag("maximum requests in flight, at most 3/4 of them from one caller; further ones are refused", 1)
    ] = 256
    max_images: Annotated[int, Flag("maximum number of images and clips per request", 0)] = 64
    max_image_bytes: Annotated[int, Flag("maximum bytes of one file", 1)] = 20 * MIB
    max_image_pixels: Annotated[int, Flag("maximum pixels of one image", 1)] = 50_000_000
    max_body_bytes: Annotated[int, Flag("maximum bytes of a request's body", 1024)] = 64 * MIB
    drain_seconds: Annotated[
        float, Flag("seconds for requests in flight to end after SIGTERM, once no more are accepted", 0)
    ] = 60.0
    otlp_endpoint: Annotated[
        str | None,
        Flag("OpenTelemetry collector to send traces to: host:4317, or https://host:4317 for TLS"),
    ] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Flag("lowest level that is logged")] = "info"

    def __post_init__(self) -> None:
        if self.otlp_endpoint is not None and not _COLLECTOR.fullmatch(self.otlp_endpoint):
            expected = "host:port, http://host:port or https://host:port"
            raise ValueError(f"--otlp-endpoint {self.otlp_endpoint!r}: expected {expected}")
        if (self.cert is None) != (self.key is None):
            raise ValueError("--cert and --key must be set together")

    @property
    def refusal(self) -> str:
        """The message for an encoder that refuses the token."""
        if self.token:
            return "the encoder refused the token of --token"
        return f"the encoder requires a token: set --token or {self.prefix}TOKEN"

    def encoder_tls(self) -> bool | Path | grpc.ChannelCredentials:
        """TLS to the encoder. Raises ValueError for a file that cannot be used."""
        return tls_of(tls=self.tls, ca=self.ca, cert=self.cert, key=self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings(GatewaySettings):
    """Settings of `vitwire router`, each also a variable VITWIRE_ROUTER_*."""

    prefix: ClassVar[str] = "VITWIRE_ROUTER_"

    engine: Annotated[Engine, Flag("the engine's dialect")] = "vllm"
    engine_url: Annotated[str, Flag("address of the engine's HTTP server, without /v1")] = "http://127.0.0.1:8000"
    engine_health_path: Annotated[
        str, Flag("path of the engine's health, which answers 200; empty: /health does not ask the engine")
    ] = "/health"
    no_engine: Annotated[bool, Flag("run without an engine: only embeddings of images are answered")] = False
    engine_ca: Annotated[Path | None, Flag("root certificates of the engine, PEM, for an https:// address")] = None
    mode: Annotated[
        Mode | None,
        Flag(
            "inline: requests carry embeddings (vLLM's default); reference: the engine fetches them (SGLang's default)"
        ),
    ] = None
    api_keys_file: Annotated[
        Path | None, Flag("accept only these API keys, one per line; read again when it changes")
    ] = None
    content_key_file: Annotated[Path | None, Flag("file with the secret of ids, 32 bytes or more; default: random")] = (
        None
    )
    allow_caller_embeds: Annotated[bool, Flag("pass on embeddings that callers send; trust them all")] = False
    engine_api_key_file: Annotated[
        Path | None, Flag("file with the API key for the engine, sent in place of the caller's")
    ] = None
    max_header_bytes: Annotated[int, Flag("maximum bytes of a request's path and headers", 1024)] = 32768
    max_buffered_bytes: Annotated[
        int,
        Flag("maximum bytes of requests and images held, at most 3/4 from one caller; further requests get 429", 1024),
    ] = 2048 * MIB
    max_encoding: Annotated[int, Flag("maximum number of images being read and encoded at a time", 1)] = 32
    encoder_retries: Annotated[int, Flag("number of retries when the encoder is unavailable or overloaded", 0)] = 3
    encoder_wait: Annotated[
        float,
        Flag(
            "seconds to wait for the encoder: in mode inline for embeddings, in mode reference to accept images", 0.001
        ),
    ] = 30.0
    on_encoder_failure: Annotated[
        OnFailure,
        Flag("if the encoder fails or the wait is over: answer with an error, or let the engine encode the images"),
    ] = "error"
    clips: Annotated[
        Clips, Flag("encode clips (video_url), or leave them to the engine, which fetches their URLs itself")
    ] = "encode"
    body_seconds: Annotated[float, Flag("seconds for a request's body to arrive", 0.001)] = 60.0
    encode_seconds: Annotated[float, Flag("seconds to fetch and encode the images of a request", 0.001)] = 60.0
    engine_connect_seconds: Annotated[float, Flag("seconds to connect to the engine", 0.001)] = 5.0
    engine_seconds: Annotated[float, Flag("seconds without a byte from the engine", 0.001)] = 600.0
    stall_seconds: Annotated[float, Flag("seconds before a stalled caller is dropped", 0.001)] = 60.0
    lame_duck_seconds: Annotated[
        float, Flag("seconds from SIGTERM, with /health failing, until connections are refused", 0)
    ] = 0.0
    log_format: Annotated[Literal["text", "json"], Flag("format of log lines")] = "text"

    def __post_init__(self) -> None:
        GatewaySettings.__post_init__(self)
        _check_url(self.engine_url)
        if self.engine_url.rstrip("/").endswith("/v1"):
            raise ValueError(f"--engine-url {self.engine_url!r} ends in /v1: leave that out, request paths include it")
        if not _PATH.fullmatch(self.engine_health_path):
            raise ValueError(f"--engine-health-path {self.engine_health_path!r}: expected a path such as /health")
        if self.max_image_bytes > self.max_body_bytes:
            raise ValueError("--max-image-bytes exceeds --max-body-bytes")
        engines = {
            "--mode": self.mode,
            "--engine-api-key-file": self.engine_api_key_file,
            "--on-encoder-failure engine": self.on_encoder_failure == "engine",
        }
        if self.no_engine and (names := [name for name, value in engines.items() if value]):
            raise ValueError(f"{names[0]} needs an engine: leave it out with --no-engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings(GatewaySettings):
    """Settings of `vitwire sglang-encoder`."""

    port: Annotated[int, Flag("HTTP port; 0 picks a free one, -1 disables it", -1, _MAX_PORT)] = 30100
    grpc_port: Annotated[int, Flag("gRPC port; 0 picks a free one, -1 disables it", -1, _MAX_PORT)] = -1
    timeout: Annotated[float, Flag("seconds of each request to the encoder", 0.001)] = 60.0
    register: Annotated[
        tuple[str, ...],
        Flag("bootstrap server of an SGLang that has no --encoder-urls, http://host:8997; repeatable"),
    ] = ()
    advertise: Annotated[str | None, Flag("this encoder's URL for --register")] = None
    allow_image_folder: Annotated[
        tuple[Path, ...], Flag("folder that image paths may be in; repeatable; without it paths are refused")
    ] = ()
    receiver_network: Annotated[
        tuple[str, ...], Flag("network (CIDR) that embeddings may be sent to; repeatable; any if not set")
    ] = ()
    output_type: Annotated[
        Literal["float32", "float16", "bfloat16"] | None, Flag("type of the embeddings; default: the server's")
    ] = None
    send_seconds: Annotated[float, Flag("seconds for SGLang to register a receiver, and to take an embedding", 0.1)] = (
        60.0
    )
    drain_seconds: Annotated[
        float, Flag("seconds for requests in flight to end after SIGTERM, once no more are accepted", 0)
    ] = 30.0

    def __post_init__(self) -> None:
        GatewaySettings.__post_init__(self)
        if self.port < 0 and self.grpc_port < 0:
            raise ValueError("--port and --grpc-port are both -1: set one")
        if self.register and not self.advertise:
            raise ValueError("--register needs --advertise, this encoder's URL for SGLang")
        for url in self.register:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"--register {url!r} does not start with http:// or https://")


def _check_url(text: str) -> None:
    """Raises ValueError for what is not the address of an HTTP server."""
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"--engine-url {text!r} does not start with http:// or https://")
    try:
        url = urlsplit(text)
        is_complete = bool(url.hostname) and url.port != 0
    except ValueError as error:
        raise ValueError(f"--engine-url {text!r}: {error}") from error
    if not is_complete or url.username or url.password or url.query or url.fragment:
        raise ValueError(f"--engine-url {text!r}: expected http://host:port, without user name and query")
