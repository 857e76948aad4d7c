"""Settings of the service: its addresses, its limits, and who may use it.

Each field is a flag, a variable, a TOML key and its help text; each class is a heading of the help.
"""

from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator
from pydantic_settings import CliImplicitFlag

from vitwire_server.config.model_flags import MAX_BYTES, MAX_ITEMS, MAX_PATCHES, MIB, Bytes, auto_or
from vitwire_server.config.sources import SourcedSettings
from vitwire_server.core.decoding import MAX_PICTURE_PIXELS

MAX_MESSAGE_BYTES = (1 << 31) - 1
"""gRPC stores the size of a message in a C int."""
_MAX_DECODE_PROCESSES = 256
_MAX_QUEUED_ITEMS = 1 << 31
_WIDEST_ROW_BYTES = 3 * 2 * 16 * 16 * 4
"""The widest pixel row of any family, in float32."""
_LONGEST_AGE = 1e6
_LONGEST = 1e9
"""Seconds: 31 years."""
Port: TypeAlias = Annotated[int, Field(ge=0, le=65535)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, le=_LONGEST, allow_inf_nan=False)]
Timeout: TypeAlias = Annotated[float, Field(gt=0, le=_LONGEST, allow_inf_nan=False)]


class AddressSettings(SourcedSettings):
    """addresses"""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: Port = Field(default=50051, description="port to listen on; 0 picks a free port, printed on stdout")
    unix_socket: Path | None = Field(
        default=None, description="also listen on this Unix socket; with --devices, process N uses PATH.N"
    )
    metrics_host: str = Field(
        default="127.0.0.1", description="address of the metrics port (/metrics, /healthz, status page)"
    )
    metrics_port: Port = Field(default=9464, description="metrics port; 0 picks a free port")
    metrics: CliImplicitFlag[bool] = Field(default=True, description="enable the metrics port")


class LimitSettings(SourcedSettings):
    """limits of requests"""

    max_queued_items: int = Field(
        default=4096, ge=1, le=_MAX_QUEUED_ITEMS, description="maximum items admitted and not yet answered"
    )
    max_queued_bytes: int = Field(
        default=4096 * MIB,
        ge=1,
        le=MAX_BYTES,
        description="maximum bytes admitted and not yet answered, pixels and resulting embeddings together",
    )
    max_request_bytes: int | None = Field(
        default=None,
        ge=1,
        le=MAX_MESSAGE_BYTES,
        description="maximum bytes per message; none: the size of the largest item allowed",
    )
    max_items_per_request: int = Field(default=256, ge=1, le=MAX_ITEMS, description="maximum items per request")
    max_patches_per_item: int = Field(default=65536, ge=4, le=MAX_PATCHES, description="maximum patches per item")

    @property
    def message_bytes(self) -> int:
        """Upper bound of a message's bytes for every model family, used before the model is loaded."""
        return self.max_request_bytes or min(self.max_patches_per_item * _WIDEST_ROW_BYTES + MIB, MAX_MESSAGE_BYTES)


class FileSettings(SourcedSettings):
    """items sent as files"""

    decode_processes: Annotated[str, auto_or(0, _MAX_DECODE_PROCESSES)] = Field(
        default="auto",
        description="number of processes per device that decode files and prepare pictures; one more reads headers; "
        "0: items must be pixels as a processor returns them; auto: half of the cores, 1 to 8; needs Linux",
    )
    prepare: Literal["auto", "device", "cpu"] = Field(
        default="auto",
        description="where pictures and decoded files are resized and tiled: cpu, in the decoders; device, on the "
        "model's device; auto: on a GPU, if generated pictures get the same pixels there as from Pillow",
    )
    decode: Literal["auto", "device", "cpu"] = Field(
        default="auto",
        description="where JPEG files are decoded: cpu, in the decoders; device, by one more decoder per RPC process "
        "on the model's device (needs vitwire[jpeg]); auto: on a GPU, if generated pictures are within 1 of Pillow's",
    )
    max_encoded_bytes: int = Field(
        default=32 * MIB, ge=1, le=1 << 30, description="maximum bytes of an item that is sent as a file"
    )
    max_image_pixels: int = Field(
        default=64 * MIB,
        ge=1,
        le=MAX_PICTURE_PIXELS,
        description="maximum pixels of a picture, sent as a file or not, or of a frame of a clip",
    )
    decode_seconds: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="maximum processor time for decoding one file; small files have less",
    )

    @property
    def decode_process_count(self) -> int | None:
        """Processes per device that decode; None leaves the number to `host.decode_processes`."""
        return None if self.decode_processes == "auto" else int(self.decode_processes)


class CacheSettings(SourcedSettings):
    """cache"""

    cache_bytes: Bytes = Field(default=0, description="size of the embedding cache in bytes; 0 disables it")


class TimeoutSettings(SourcedSettings):
    """timeouts and shutdown"""

    idle_seconds: Timeout = Field(default=60.0, description="seconds until a stalled client is cut off")
    max_connection_age_seconds: float = Field(
        default=300.0,
        ge=0,
        le=_LONGEST_AGE,
        description="seconds until clients are asked to reconnect, so that they discover new replicas; 0 disables this",
    )
    canary_seconds: Seconds = Field(
        default=10.0,
        description="seconds of idle time before the engine runs a test item; 0 disables this",
    )
    wedge_seconds: Timeout = Field(
        default=60.0,
        description="seconds without progress, beyond what the batch needs, before the engine is declared hung",
    )
    unresponsive_seconds: Timeout = Field(
        default=60.0,
        description="with --devices or --rpc-processes: seconds a child process may be stopped or have a blocked event "
        "loop before it is killed and restarted",
    )
    drain_seconds: Seconds = Field(
        default=30.0,
        description="seconds that requests in flight may take to finish at shutdown",
    )
    lame_duck_seconds: Seconds = Field(
        default=5.0,
        description="seconds to keep serving at shutdown after the server stops reporting ready",
    )


class AccessSettings(SourcedSettings):
    """TLS and tokens"""

    tls_cert: Path | None = Field(default=None, description="certificate chain, PEM; reloaded when the file changes")
    tls_key: Path | None = Field(default=None, description="private key of the certificate, PEM, not encrypted")
    tls_client_ca: Path | None = Field(
        default=None, description="CA certificate, PEM, that client certificates must be signed by (mutual TLS)"
    )
    auth_tokens_file: Path | None = Field(
        default=None, description="bearer tokens, one per line with an optional name; reloaded when the file changes"
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key must be set together")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        return self


class DeliverySettings(CacheSettings):
    """delivery through NIXL"""

    nixl: CliImplicitFlag[bool] = Field(
        default=False, description="write embeddings into the memory of clients that ask for it, through NIXL"
    )
    nixl_seconds: Timeout = Field(
        default=5.0,
        description="seconds a NIXL delivery may take before the embedding is sent in the response",
    )
    store_bytes: Bytes = Field(
        default=2048 * MIB,
        description="with --nixl and --cache-bytes: maximum bytes of embeddings that wait on the device for a client; "
        "further ones wait on the host",
    )

    @property
    def stored_bytes(self) -> int:
        """Maximum bytes of embeddings that wait on the device for a client; 0 if none do."""
        return self.store_bytes if self.nixl and self.cache_bytes else 0


class DebugSettings(SourcedSettings):
    """logs and debugging"""

    reflection: CliImplicitFlag[bool] = Field(default=True, description="enable gRPC server reflection")
    channelz: CliImplicitFlag[bool] = Field(
        default=False, description="enable gRPC channelz (sockets and calls, for debugging)"
    )
    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^(https?://)?[^/\s]+/?$",
        description="OpenTelemetry collector to send traces to: host:4317, or https://host:4317 for TLS",
    )
    record_trace: Path | None = Field(
        default=None,
        description="append the item sizes of each request to this regular file, for vitwire-server budgets --trace",
    )
    log_format: Literal["text", "json"] = Field(default="text", description="format of every line on stderr and stdout")
    strict_config: CliImplicitFlag[bool] = Field(
        default=False, description="exit with an error on unknown VITWIRE_ variables instead of a warning"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lowest severity to log"
    )
