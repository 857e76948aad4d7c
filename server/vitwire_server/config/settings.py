"""Settings of `vitwire-server serve`: each field of one class is a flag, a variable, a TOML key and its help text.

A flag beats its environment variable (`--max-queued-items`, `VITWIRE_MAX_QUEUED_ITEMS`), which
beats the TOML file that `--config` or `VITWIRE_CONFIG` names, which beats the default.
"""

import re
import sys
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import CliImplicitFlag

from vitwire_server.config.ladder_files import token_counts
from vitwire_server.config.sources import SourcedSettings

MAX_MESSAGE_BYTES = (1 << 31) - 1
"""gRPC stores the size of a message in a C int."""
MAX_ITEMS = 8192
"""Most items in one message; bounds how long parsing one can block the event loop."""
MAX_PATCHES = 1 << 20
"""Most patches in one item: 1,024 images of 512 x 512 in most families, 6 GB in float32."""
MAX_RPC_PROCESSES = 64
"""Most edge processes per device."""
MAX_DECODE_PROCESSES = 256
MAX_IMAGE_PIXELS = 89_478_485
"""Most pixels that the client's code, which decodes, accepts."""
_MIB = 1 << 20
_LAST_PORT = 65535
_EVERY_ADDRESS = {"0.0.0.0", "::"}  # noqa: S104 - compared with, not listened on
_LONGEST_AGE = 1e6
_WIDEST_ROW_BYTES = 3 * 2 * 16 * 16 * 4
"""The widest pixel row of any family, in float32."""


class UsageError(Exception):
    """A flag, a variable or the TOML file is wrong; the message names it."""


class ServeSettings(SourcedSettings):
    """Serve a model's vision tower over gRPC.

    Every flag has a same-named environment variable (--max-queued-items, VITWIRE_MAX_QUEUED_ITEMS)
    and a same-named key in the TOML file that --config FILE reads. Flag beats variable beats file.
    """

    model: str = Field(description="Hugging Face model id, or a checkpoint directory in Hugging Face layout")
    lora: str | None = Field(
        default=None,
        pattern=r"^[\w.-]{1,64}=.+$",
        description="PEFT adapter whose vision weights are merged at load, as NAME=DIR",
    )
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(
        default=50051, ge=0, le=65535, description="port to listen on; 0 picks a free port, printed on stdout"
    )
    unix_socket: Path | None = Field(
        default=None, description="also listen on this Unix socket; with --devices, process N uses PATH.N"
    )
    metrics_host: str = Field(
        default="127.0.0.1", description="address of the metrics port (/metrics, /healthz, status page)"
    )
    metrics_port: int = Field(default=9464, ge=0, le=65535, description="metrics port; 0 picks a free port")
    metrics: CliImplicitFlag[bool] = Field(default=True, description="enable the metrics port")
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$", description="auto, cpu, cuda or cuda:N"
    )
    devices: str = Field(
        default="none",
        pattern=r"^(none|(cpu|cuda(:\d{1,3})?)(,(cpu|cuda(:\d{1,3})?))*)$",
        description="run one process per listed device (cuda:0,cuda:1), on consecutive ports and the Unix sockets "
        "PATH.0, PATH.1; none: serve --device in this process",
    )
    rpc_processes: str = Field(
        default="auto",
        description="number of processes per device that serve RPCs; 1: the process that drives the device does both; "
        "auto: 1 on CPU, on CUDA up to 6 according to the cores; more than 1 needs Linux",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="compute dtype of the tower; auto uses the checkpoint's dtype"
    )
    pooling: Literal["none", "cls", "mean", "attention"] = Field(
        default="none",
        description="one row per image, or per frame of a clip, instead of rows of its patches: cls, the class token; "
        "mean, the mean of those rows; attention, the model's own pooling head; docs/models.md says what models offer",
    )
    precision: Literal["auto", "fp8"] = Field(
        default="auto",
        description="fp8: compute linear layers in float8 (e4m3), everything else in bfloat16, on Ada, Hopper or newer "
        "GPUs; auto: everything in --dtype",
    )
    precision_floor: float = Field(
        default=0.999,
        ge=0,
        le=1,
        description="with --precision fp8: minimum cosine similarity of each row of the test pictures to bfloat16; "
        "below it the server does not start",
    )
    graphs: Literal["auto", "cuda", "simulated", "off"] = Field(
        default="auto",
        description="type of budget graphs; auto is cuda on a CUDA device, else off; simulated runs on any device",
    )
    budgets: str = Field(
        default="auto",
        description="token counts of the budgets (64,256,1024), a file written by vitwire-server budgets, auto: the "
        "model's default ladder, or learn: begin with that and follow the loads",
    )
    state_dir: Path | None = Field(
        default=None, description="directory for what --budgets learn learns; none: the checkpoint's directory"
    )
    graph_memory: int = Field(
        default=4096 * _MIB, ge=0, description="estimated bytes that automatically chosen budgets may use"
    )
    max_budget_tokens: int = Field(
        default=4096, ge=1, le=MAX_PATCHES, description="maximum tokens per budget and per eager batch"
    )
    max_items_per_batch: int = Field(default=64, ge=1, le=MAX_ITEMS, description="maximum items per forward")
    max_frames_per_batch: int = Field(
        default=512, ge=1, le=MAX_PATCHES, description="maximum attention segments (frames) per forward"
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="auto: Vitwire's fused kernels on CUDA, torch.compile for frequent shapes in bfloat16 on CPU; "
        "on: torch.compile (on CUDA, of the blocks in graphs); off: plain PyTorch",
    )
    attention_backend: str = Field(
        default="auto",
        description="sdpa, triton, varlen, cudnn, fa3, fa4, or auto: the fastest that passes the accuracy check",
    )
    max_queued_items: int = Field(default=4096, ge=1, description="maximum items admitted and not yet answered")
    max_queued_bytes: int = Field(
        default=4096 * _MIB,
        ge=1,
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
    decode_processes: str = Field(
        default="auto",
        description="number of processes per device that decode items sent as JPEG, PNG, WebP, MP4 or WebM files; "
        "0: items must be pixels; auto: half of the cores, 1 to 8; needs Linux and Pillow",
    )
    max_encoded_bytes: int = Field(
        default=32 * _MIB, ge=1, le=1 << 30, description="maximum bytes of an item that is sent as a file"
    )
    max_image_pixels: int = Field(
        default=64 * _MIB,
        ge=1,
        le=MAX_IMAGE_PIXELS,
        description="maximum pixels of an image that is sent as a file, or of a frame of a clip",
    )
    decode_seconds: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="maximum processor time for decoding one file",
    )
    cache_bytes: int = Field(default=0, ge=0, description="size of the embedding cache in bytes; 0 disables it")
    idle_seconds: float = Field(
        default=60.0, gt=0, allow_inf_nan=False, description="seconds until a stalled client is cut off"
    )
    max_connection_age_seconds: float = Field(
        default=300.0,
        ge=0,
        le=_LONGEST_AGE,
        description="seconds until clients are asked to reconnect, so that they discover new replicas; 0 disables this",
    )
    canary_seconds: float = Field(
        default=10.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds of idle time before the engine runs a test item; 0 disables this",
    )
    wedge_seconds: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds without progress, beyond what the batch needs, before the engine is declared hung",
    )
    unresponsive_seconds: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        description="with --devices or --rpc-processes: seconds a child process may be stopped or have a blocked event "
        "loop before it is killed and restarted",
    )
    drain_seconds: float = Field(
        default=30.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds that requests in flight may take to finish at shutdown",
    )
    lame_duck_seconds: float = Field(
        default=5.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds to keep serving at shutdown after the server turns not ready",
    )
    record_trace: Path | None = Field(
        default=None,
        description="append the item sizes of each request to this file, for vitwire-server budgets --trace",
    )
    tls_cert: Path | None = Field(default=None, description="certificate chain, PEM; reloaded when the file changes")
    tls_key: Path | None = Field(default=None, description="private key of the certificate, PEM, not encrypted")
    tls_client_ca: Path | None = Field(
        default=None, description="CA certificate, PEM, that client certificates must be signed by (mutual TLS)"
    )
    auth_tokens_file: Path | None = Field(
        default=None, description="bearer tokens, one per line with an optional name; reloaded when the file changes"
    )
    nixl: CliImplicitFlag[bool] = Field(
        default=False, description="write embeddings into the memory of clients that ask for it, through NIXL"
    )
    nixl_seconds: float = Field(
        default=5.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds a NIXL delivery may take before the embedding is sent in the response",
    )
    reflection: CliImplicitFlag[bool] = Field(default=True, description="enable gRPC server reflection")
    channelz: CliImplicitFlag[bool] = Field(
        default=False, description="enable gRPC channelz (sockets and calls, for debugging)"
    )
    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^(https?://)?[^/\s]+/?$",
        description="OpenTelemetry collector to send traces to: host:4317, or https://host:4317 for TLS",
    )
    log_format: Literal["text", "json"] = Field(default="text", description="format of every line on stderr and stdout")
    strict_config: CliImplicitFlag[bool] = Field(
        default=False, description="exit with an error on unknown VITWIRE_ variables instead of a warning"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lowest severity to log"
    )

    @field_validator("budgets", "devices", mode="before")
    @classmethod
    def _list_of_toml(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        if not value or any(isinstance(each, bool) or not isinstance(each, int | str) for each in value):
            raise ValueError("a TOML list needs at least one element, all of them numbers or names")
        return ",".join(map(str, value))

    @field_validator("rpc_processes", mode="before")
    @classmethod
    def _auto_or_a_number(cls, value: object) -> object:
        text = str(value)
        if text != "auto" and not (re.fullmatch(r"\d{1,4}", text, re.ASCII) and 1 <= int(text) <= MAX_RPC_PROCESSES):
            raise ValueError(f"expected auto or a number from 1 to {MAX_RPC_PROCESSES}")
        if text not in {"auto", "1"} and sys.platform != "linux":
            raise ValueError("more than 1 needs Linux")
        return text

    @field_validator("decode_processes", mode="before")
    @classmethod
    def _auto_or_a_count(cls, value: object) -> object:
        text = str(value)
        if text != "auto" and not (re.fullmatch(r"\d{1,4}", text, re.ASCII) and int(text) <= MAX_DECODE_PROCESSES):
            raise ValueError(f"expected auto or a number from 0 to {MAX_DECODE_PROCESSES}")
        if text not in {"auto", "0"} and sys.platform != "linux":
            raise ValueError("more than 0 needs Linux")
        return text

    @field_validator("budgets")
    @classmethod
    def _budgets_are_token_counts(cls, value: str) -> str:
        if value not in ("auto", "learn"):
            token_counts(value)
        return value

    @model_validator(mode="after")
    def _budgets_fit(self) -> "ServeSettings":
        sizes = self.budget_sizes
        if sizes and max(sizes) > self.max_budget_tokens:
            raise ValueError(f"budgets: {max(sizes)} is more than max_budget_tokens {self.max_budget_tokens}")
        return self

    @model_validator(mode="after")
    def _precision_fits(self) -> "ServeSettings":
        if self.precision == "fp8" and self.dtype not in {"auto", "bfloat16"}:
            raise ValueError(f"--precision fp8 needs --dtype auto or bfloat16, not {self.dtype}")
        if self.precision == "fp8" and self.compile == "on":
            raise ValueError("--precision fp8 and --compile on cannot be used together")
        if self.precision != "fp8" and self.precision_floor != type(self).model_fields["precision_floor"].default:
            raise ValueError("--precision-floor needs --precision fp8")
        return self

    @model_validator(mode="after")
    def _devices_fit(self) -> "ServeSettings":
        if self.device_list and self.device != "auto":
            raise ValueError(f"--device {self.device} and --devices {self.devices} cannot be used together")
        last = max(self.port, self.metrics_port) + len(self.device_list) - 1
        if last > _LAST_PORT:
            raise ValueError(
                f"--devices: {len(self.device_list)} consecutive ports would end at {last}, above {_LAST_PORT}"
            )
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> "ServeSettings":
        ranges = self.port_ranges
        hosts = {self.host.strip("[]"), self.metrics_host.strip("[]")}
        if len(ranges) < 2 or (len(hosts) == 2 and not hosts & _EVERY_ADDRESS):
            return self
        grpc, pages = ranges["--port"], ranges["--metrics-port"]
        if both := set(grpc) & set(pages):
            needed = f"{_span(grpc)} for gRPC and {_span(pages)} for metrics"
            raise ValueError(f"--port and --metrics-port: port {min(both)} is needed twice ({needed})")
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> "ServeSettings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key must be set together")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        return self

    @property
    def adapter(self) -> tuple[str, Path] | None:
        """Name and directory of the adapter to merge."""
        name, _, folder = (self.lora or "").partition("=")
        return (name, Path(folder).expanduser()) if name else None

    @property
    def device_list(self) -> list[str]:
        """The device of each child process; empty without `--devices`."""
        return [] if self.devices == "none" else self.devices.split(",")

    @property
    def rpc_process_count(self) -> int | None:
        """Processes per device that serve RPCs; None leaves the number to `host.rpc_processes`."""
        return None if self.rpc_processes == "auto" else int(self.rpc_processes)

    @property
    def decode_process_count(self) -> int | None:
        """Processes per device that decode; None leaves the number to `host.decode_processes`."""
        return None if self.decode_processes == "auto" else int(self.decode_processes)

    @property
    def port_ranges(self) -> dict[str, range]:
        """Ports to listen on, by the flag that sets the first of them; leaves out port 0."""
        count = max(1, len(self.device_list))
        first = {"--port": self.port, "--metrics-port": self.metrics_port if self.metrics else 0}
        return {flag: range(port, port + count) for flag, port in first.items() if port}

    @property
    def budget_sizes(self) -> list[int] | None:
        """Tokens of each budget, ascending; None for automatic budgets."""
        return None if self.budgets in ("auto", "learn") else token_counts(self.budgets)

    @property
    def learns(self) -> bool:
        """Whether budgets follow the loads."""
        return self.budgets == "learn"

    @property
    def message_bytes(self) -> int:
        """Upper bound of a message's bytes for every model family, used before the model is loaded."""
        return self.max_request_bytes or min(self.max_patches_per_item * _WIDEST_ROW_BYTES + _MIB, MAX_MESSAGE_BYTES)


def _span(ports: range) -> str:
    return str(ports[0]) if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
