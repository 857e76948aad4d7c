"""Settings of both commands: one table for flags, environment variables and help."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import urlsplit

import grpc

from vitwire.shared.named_files import tls_of
from vitwire_flags.options import flag, size

Mode = Literal["inline", "reference"]
MIB = 1 << 20
_MAX_PORT = 65535
_PATH = re.compile(r"(/[!-~]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Settings of both commands; every field is a flag. Raises ValueError if invalid."""

    prefix: ClassVar[str] = ""
    """Prefix of the variables of all options; without it only those that name one are variables."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8080, "port to listen on; 0 picks a free one and prints it", 0, _MAX_PORT)
    target: str = flag(
        "127.0.0.1:50051",
        "the encoder: host:port, dns:///name:port or unix:path; without a port, 50051",
        envvar="VITWIRE_TARGET",
    )
    token: str | None = flag(None, "bearer token for the encoder", envvar="VITWIRE_TOKEN", hide_input=True)
    tls: bool = flag(False, "use TLS to the encoder, with the system's root certificates unless --ca is set")
    ca: Path | None = flag(None, "root certificates of the encoder, PEM; implies --tls")
    cert: Path | None = flag(None, "client certificate for the encoder, PEM, for mutual TLS")
    key: Path | None = flag(None, "private key of the client certificate, PEM")
    allow_image_host: tuple[str, ...] = flag(
        (), "host that URLs may name: host, host:port or *.domain; repeatable; without it URLs are refused"
    )
    allow_image_network: tuple[str, ...] = flag((), "non-public network (CIDR) that these hosts may be in; repeatable")
    fetch_seconds: float = flag(10.0, "seconds to fetch one URL, with redirects", 0.001)
    max_requests: int = flag(
        256, "maximum requests in flight, at most 3/4 of them from one caller; further ones are refused", 1
    )
    max_images: int = flag(64, "maximum number of images and clips per request", 0)
    max_image_bytes: int = size(32 * MIB, "maximum bytes of one file", 1)
    max_image_pixels: int = flag(67_108_864, "maximum pixels of one image", 1)
    max_body_bytes: int = size(64 * MIB, "maximum bytes of a request's body", 1024)
    drain_seconds: float = flag(
        60.0, "seconds for requests in flight to end after SIGTERM, once no more are accepted", 0
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "lowest level that is logged")

    @property
    def refusal(self) -> str:
        """The message for an encoder that refuses the token."""
        if self.token:
            return "the encoder refused the token of --token"
        return f"the encoder requires a token: set --token or {self.prefix or 'VITWIRE_'}TOKEN"

    @classmethod
    def named(cls, name: str) -> str:
        """How an option is set, for messages: its flag and, of a router or a server's front end, its variable."""
        variable = f" or {cls.prefix}{name.upper()}" if cls.prefix else ""
        return f"--{name.replace('_', '-')}{variable}"

    def encoder_tls(self) -> bool | Path | grpc.ChannelCredentials:
        """TLS to the encoder. Raises ValueError for a file that cannot be used."""
        return tls_of(tls=self.tls, ca=self.ca, cert=self.cert, key=self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings(GatewaySettings):
    """Settings of `vitwire router`, each also a variable VITWIRE_ROUTER_*."""

    prefix: ClassVar[str] = "VITWIRE_ROUTER_"

    engine_url: str = flag("http://127.0.0.1:8000", "address of the engine's HTTP server, without /v1")
    engine_health_path: str = flag(
        "/health", "path of the engine's health, which answers 200; empty: /health does not ask the engine"
    )
    no_engine: bool = flag(
        False, "run without an engine: only embeddings of images are answered", param_decls=["--no-engine"]
    )
    engine_ca: Path | None = flag(None, "root certificates of the engine, PEM, for an https:// address")
    mode: Mode = flag("inline", "inline: requests carry embeddings; reference: the engine fetches them")
    api_keys_file: Path | None = flag(None, "accept only these API keys, one per line; read again when it changes")
    content_key_file: Path | None = flag(None, "file with the secret of ids, 32 bytes or more; default: random")
    allow_caller_embeds: bool = flag(False, "pass on embeddings that callers send; trust them all")
    engine_api_key_file: Path | None = flag(None, "file with the API key for the engine, sent in place of the caller's")
    max_header_bytes: int = size(32768, "maximum bytes of a request's path and headers", 1024)
    max_buffered_bytes: int = size(
        2048 * MIB,
        "maximum bytes of requests and images held, at most 3/4 from one caller; further requests get 429",
        1024,
    )
    max_encoding: int = flag(32, "maximum number of images being read and encoded at a time", 1)
    encoder_retries: int = flag(3, "number of retries when the encoder is unavailable or overloaded", 0)
    encoder_wait: float = flag(
        30.0,
        "seconds to wait for the encoder: in mode inline for embeddings, in mode reference to accept images",
        0.001,
    )
    on_encoder_failure: Literal["error", "engine"] = flag(
        "error", "if the encoder fails or the wait is over: answer with an error, or let the engine encode the images"
    )
    clips: Literal["encode", "engine"] = flag(
        "encode", "encode clips (video_url), or leave them to the engine, which fetches their URLs itself"
    )
    body_seconds: float = flag(60.0, "seconds for a request's body to arrive", 0.001)
    encode_seconds: float = flag(60.0, "seconds to fetch and encode the images of a request", 0.001)
    engine_connect_seconds: float = flag(5.0, "seconds to connect to the engine", 0.001)
    engine_seconds: float = flag(600.0, "seconds without a byte from the engine", 0.001)
    stall_seconds: float = flag(60.0, "seconds before a stalled caller is dropped", 0.001)
    lame_duck_seconds: float = flag(0.0, "seconds from SIGTERM, with /health failing, until connections are refused", 0)
    log_format: Literal["text", "json"] = flag("text", "format of log lines")

    def __post_init__(self) -> None:
        _check_url(self.engine_url)
        if self.engine_url.rstrip("/").endswith("/v1"):
            raise ValueError(f"--engine-url {self.engine_url!r} ends in /v1: leave that out, request paths include it")
        if not _PATH.fullmatch(self.engine_health_path):
            raise ValueError(f"--engine-health-path {self.engine_health_path!r}: expected a path such as /health")
        if self.max_image_bytes > self.max_body_bytes:
            raise ValueError("--max-image-bytes exceeds --max-body-bytes")
        engines = {
            "--mode": self.mode == "reference",
            "--engine-api-key-file": self.engine_api_key_file,
            "--on-encoder-failure engine": self.on_encoder_failure == "engine",
        }
        if self.no_engine and (names := [name for name, value in engines.items() if value]):
            raise ValueError(f"{names[0]} needs an engine: leave it out where there is none")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings(GatewaySettings):
    """Settings of `vitwire sglang-encoder`."""

    port: int = flag(30100, "port to listen on; 0 picks a free one and prints it", 0, _MAX_PORT)
    timeout: float = flag(60.0, "seconds of each request to the encoder", 0.001)
    receiver_network: tuple[str, ...] = flag(
        (), "network (CIDR) that embeddings may be sent to; repeatable; any if not set"
    )
    output_type: Literal["float32", "float16", "bfloat16"] | None = flag(
        None, "type of the embeddings; default: the server's"
    )
    send_seconds: float = flag(60.0, "seconds for SGLang to register a receiver, and to take an embedding", 0.1)
    drain_seconds: float = flag(30.0, "seconds for requests in flight to end after SIGTERM", 0)


def _check_url(text: str) -> None:
    """Raises ValueError for what is not the address of an HTTP server."""
    try:
        url = urlsplit(text)
        is_complete = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError as error:
        raise ValueError(f"--engine-url {text!r}: {error}") from error
    if not is_complete or url.username or url.password or url.query or url.fragment:
        raise ValueError(f"--engine-url {text!r}: expected http(s)://host:port, without user name and query")
