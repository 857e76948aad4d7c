"""Settings of the service: its addresses, its limits, and who may use it.

Each field is a flag, a variable, a TOML key and its help text; each class is a heading of the help.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vitwire_flags.options import flag, size
from vitwire_server.config.model_flags import MAX_BYTES, MAX_ITEMS, MAX_PATCHES, MIB
from vitwire_server.core.decoding import MAX_PICTURE_PIXELS

MAX_MESSAGE_BYTES = (1 << 31) - 1
"""gRPC stores the size of a message in a C int."""
_MAX_QUEUED_ITEMS = 1 << 31
_MAX_PORT = 65535
_WIDEST_ROW_BYTES = 3 * 2 * 16 * 16 * 4
"""The widest pixel row of any family, in float32."""
_LONGEST_AGE = 1e6
_LONGEST = 1e9
"""Seconds: 31 years."""


@dataclass(frozen=True, kw_only=True)
class AddressSettings:
    """addresses"""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(50051, "port to listen on; 0 picks a free port, printed on stdout", 0, _MAX_PORT)
    unix_socket: Path | None = flag(None, "also listen on this Unix socket; with --devices, process N uses PATH.N")
    metrics_host: str = flag("127.0.0.1", "address of the metrics port (/metrics, /healthz, /livez)")
    metrics_port: int = flag(9464, "metrics port; 0 picks a free port", 0, _MAX_PORT)
    metrics: bool = flag(True, "enable the metrics port")
    http_host: str = flag("127.0.0.1", "address of --http-port, which has no TLS")
    http_port: int | None = flag(
        None, "answer embeddings by HTTP at this port, too (extra router); with --devices, at PORT + N", 0, _MAX_PORT
    )


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """limits of requests"""

    max_queued_items: int = flag(4096, "maximum items admitted and not yet answered", 1, _MAX_QUEUED_ITEMS)
    max_queued_bytes: int = size(
        4096 * MIB,
        "maximum bytes admitted and not yet answered, pixels and resulting embeddings together",
        1,
        MAX_BYTES,
    )
    max_request_bytes: int | None = size(
        None, "maximum bytes per message; none: the size of the largest item allowed", 1, MAX_MESSAGE_BYTES
    )
    max_items_per_request: int = flag(256, "maximum items per request", 1, MAX_ITEMS)
    max_patches_per_item: int = flag(65536, "maximum patches per item", 4, MAX_PATCHES)

    @property
    def message_bytes(self) -> int:
        """Upper bound of a message's bytes for every model family, used before the model is loaded."""
        return self.max_request_bytes or min(self.max_patches_per_item * _WIDEST_ROW_BYTES + MIB, MAX_MESSAGE_BYTES)


@dataclass(frozen=True, kw_only=True)
class FileSettings:
    """items sent as files"""

    decode_processes: str = flag(
        "auto",
        "number of processes per device that decode files and prepare pictures; one more reads headers; "
        "0: items must be pixels as a processor returns them; auto: half of the cores, 1 to 8; needs Linux",
    )
    prepare: Literal["auto", "device", "cpu"] = flag(
        "auto",
        "where pictures and decoded files are resized and tiled: cpu, in the decoders; device, on the "
        "model's device; auto: on a GPU, if test pictures get the same pixels there as from Pillow",
    )
    decode: Literal["auto", "device", "cpu"] = flag(
        "auto",
        "where JPEG files and clips are decoded: cpu, in the decoders; device, by one more decoder of each per RPC "
        "process on the model's device (needs the extras jpeg and nvdec); auto: on a GPU, if test files differ from "
        "the CPU's by at most 1 of 255",
    )
    max_encoded_bytes: int = size(32 * MIB, "maximum bytes of an item that is sent as a file", 1, 1 << 30)
    max_image_pixels: int = flag(
        64 * MIB, "maximum pixels of a picture, sent as a file or not, or of a frame of a clip", 1, MAX_PICTURE_PIXELS
    )
    decode_seconds: float = flag(
        10.0, "maximum processor time for decoding one file; small files have less", 0.001, 3600
    )

    @property
    def decode_process_count(self) -> int | None:
        """Processes per device that decode; None leaves the number to `host.decode_processes`."""
        return None if self.decode_processes == "auto" else int(self.decode_processes)


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """cache"""

    cache_bytes: int = size(0, "size of the embedding cache in bytes; 0 disables it", 0, MAX_BYTES)


@dataclass(frozen=True, kw_only=True)
class TimeoutSettings:
    """timeouts and shutdown"""

    idle_seconds: float = flag(60.0, "seconds until a stalled client is cut off", 0.001, _LONGEST)
    max_connection_age_seconds: float = flag(
        300.0,
        "seconds until clients are asked to reconnect, so that they discover new replicas; 0 disables this",
        0,
        _LONGEST_AGE,
    )
    canary_seconds: float = flag(
        10.0, "seconds of idle time before the engine runs a test item; 0 disables this", 0, _LONGEST
    )
    wedge_seconds: float = flag(
        60.0,
        "seconds without progress, beyond what the batch needs, before the engine is declared hung",
        0.001,
        _LONGEST,
    )
    unresponsive_seconds: float = flag(
        60.0,
        "with --devices, --rpc-processes or --http-port: seconds a child process may be stopped or have a blocked "
        "event loop before it is killed and restarted",
        0.001,
        _LONGEST,
    )
    drain_seconds: float = flag(30.0, "seconds that requests in flight may take to finish at shutdown", 0, _LONGEST)
    lame_duck_seconds: float = flag(
        5.0, "seconds to keep serving after SIGTERM, while the server reports not ready; none after Ctrl-C", 0, _LONGEST
    )


@dataclass(frozen=True, kw_only=True)
class AccessSettings:
    """TLS and tokens"""

    tls_cert: Path | None = flag(None, "certificate chain, PEM; reloaded when the file changes")
    tls_key: Path | None = flag(None, "private key of the certificate, PEM, not encrypted")
    tls_client_ca: Path | None = flag(
        None, "CA certificate, PEM, that client certificates must be signed by (mutual TLS)"
    )
    auth_tokens_file: Path | None = flag(
        None, "bearer tokens, one per line with an optional name; reloaded when the file changes"
    )
    http_token: str = field(default="", repr=False)
    """By which the HTTP front end calls if tokens are required; no flag."""


@dataclass(frozen=True, kw_only=True)
class DeliverySettings(CacheSettings):
    """delivery through NIXL"""

    nixl: bool = flag(False, "write embeddings into the memory of clients that ask for it, through NIXL")
    nixl_seconds: float = flag(
        5.0, "seconds a NIXL delivery may take before the embedding is sent in the response", 0.001, _LONGEST
    )
    store_bytes: int = size(
        2048 * MIB,
        "with --nixl and --cache-bytes: maximum bytes of embeddings that wait on the device for a client; "
        "further ones wait on the host",
        0,
        MAX_BYTES,
    )

    @property
    def stored_bytes(self) -> int:
        """Maximum bytes of embeddings that wait on the device for a client; 0 if none do."""
        return self.store_bytes if self.nixl and self.cache_bytes else 0


@dataclass(frozen=True, kw_only=True)
class DebugSettings:
    """logs and debugging"""

    reflection: bool = flag(True, "enable gRPC server reflection")
    otlp_endpoint: str | None = flag(
        None, "OpenTelemetry collector to send traces to: host:4317, or https://host:4317 for TLS"
    )
    record_trace: Path | None = flag(
        None, "append the item sizes of each request to this regular file, for vitwire-server budgets --trace"
    )
    log_format: Literal["text", "json"] = flag("text", "format of every line on stderr and stdout")
    strict_config: bool = flag(False, "exit with an error on unknown VITWIRE_ variables instead of a warning")
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "lowest severity to log")
