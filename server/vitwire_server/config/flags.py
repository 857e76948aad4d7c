"""Fields of the settings of `vitwire-server serve`: each is a flag, a variable, a TOML key and its help text.

A flag beats its environment variable (`--max-queued-items`, `VITWIRE_MAX_QUEUED_ITEMS`), which
beats the TOML file that `--config` or `VITWIRE_CONFIG` names, which beats the default.
"""

import re
import sys
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, field_validator
from pydantic_settings import CliImplicitFlag

from vitwire_server.config.ladder_files import token_counts
from vitwire_server.config.sources import SourcedSettings
from vitwire_server.core.decoding import MAX_PICTURE_PIXELS

MAX_MESSAGE_BYTES = (1 << 31) - 1
"""gRPC stores the size of a message in a C int."""
MAX_ITEMS = 8192
"""Most items in one message; bounds how long parsing one can block the event loop."""
MAX_PATCHES = 1 << 20
"""Most patches in one item: 1,024 images of 512 x 512 in most families, 6 GB in float32."""
MAX_RPC_PROCESSES = 64
"""Most RPC processes per device."""
MAX_DECODE_PROCESSES = 256
_MIB = 1 << 20
MAX_QUEUED_ITEMS = 1 << 31
MAX_BYTES = 1 << 44
"""More than any host has; an address space holds several times as much."""
_LONGEST_AGE = 1e6
_LONGEST = 1e9
"""Seconds: 31 years."""
Port: TypeAlias = Annotated[int, Field(ge=0, le=65535)]
Bytes: TypeAlias = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, le=_LONGEST, allow_inf_nan=False)]
Timeout: TypeAlias = Annotated[float, Field(gt=0, le=_LONGEST, allow_inf_nan=False)]


class Flags(SourcedSettings):
    """The fields, each checked by itself."""

    model: str = Field(description="Hugging Face model id, or a checkpoint directory in Hugging Face layout")
    lora: str | None = Field(
        default=None,
        pattern=r"^[\w.-]{1,64}=.+$",
        description="PEFT adapter whose vision weights are merged at load, as NAME=DIR",
    )
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
        default=None,
        description="directory that --budgets learn keeps its ladders in; none: the checkpoint's directory",
    )
    graph_memory: Bytes = Field(
        default=4096 * _MIB, description="estimated bytes that automatically chosen budgets may use"
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
        description="auto: Vitwire's fused kernels on CUDA, frequent shapes compiled in bfloat16 on CPU; "
        "on: torch.compile of the blocks in graphs on CUDA, frequent shapes compiled on CPU; off: plain PyTorch",
    )
    attention_backend: str = Field(
        default="auto",
        description="sdpa, triton, varlen, cudnn, fa3, fa4, or auto: the fastest that passes the accuracy check",
    )
    max_queued_items: int = Field(
        default=4096, ge=1, le=MAX_QUEUED_ITEMS, description="maximum items admitted and not yet answered"
    )
    max_queued_bytes: int = Field(
        default=4096 * _MIB,
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
    decode_processes: str = Field(
        default="auto",
        description="number of processes per device that decode files and prepare pictures; one more reads headers; "
        "0: items must be pixels as a processor returns them; auto: half of the cores, 1 to 8; needs Linux",
    )
    prepare: Literal["auto", "device", "cpu"] = Field(
        default="auto",
        description="where pictures, and files once they are decoded, are resized and cut: in the decoders, or on the "
        "model's device; auto: on a GPU, if drawn pictures have the pixels there that Pillow gives",
    )
    decode: Literal["auto", "device", "cpu"] = Field(
        default="auto",
        description="where JPEG files are decoded: in the decoders, or by one more for each RPC process on the model's "
        "device, for which vitwire[jpeg] must be installed; auto: on a GPU, if drawn pictures are within 1 of Pillow's",
    )
    max_encoded_bytes: int = Field(
        default=32 * _MIB, ge=1, le=1 << 30, description="maximum bytes of an item that is sent as a file"
    )
    max_image_pixels: int = Field(
        default=64 * _MIB,
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
    cache_bytes: Bytes = Field(default=0, description="size of the embedding cache in bytes; 0 disables it")
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
        description="seconds to keep serving at shutdown after the server turns not ready",
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
    nixl_seconds: Timeout = Field(
        default=5.0,
        description="seconds a NIXL delivery may take before the embedding is sent in the response",
    )
    store_bytes: Bytes = Field(
        default=2048 * _MIB,
        description="with --nixl and --cache-bytes: maximum bytes of embeddings that wait on the device for a client; "
        "further ones wait on the host",
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
