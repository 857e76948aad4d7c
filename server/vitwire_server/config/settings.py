"""Settings of `vitwire-server serve`: one frozen struct is flags, environment and help text.

A flag beats its environment variable (`--max-queued-items`, `VITWIRE_MAX_QUEUED_ITEMS`), which
beats the TOML file that `--config` or `VITWIRE_CONFIG` names, which beats the default.
"""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliImplicitFlag,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from vitwire_server.config.ladder_files import token_counts
from vitwire_server.config.variables import PREFIX, without_injected

MAX_MESSAGE_BYTES = (1 << 31) - 1
"""gRPC counts a message's bytes in a C int."""
MAX_ITEMS = 8192
"""Items of one message at most, so that reading one never holds up the others for long."""
MAX_PATCHES = 1 << 20
"""Patches of one item at most: 1,024 images of 512 x 512 in most families, 6 GB in float32."""
_MIB = 1 << 20
_LAST_PORT = 65535
_EVERY_ADDRESS = {"0.0.0.0", "::"}  # noqa: S104 - compared with, not listened on
_LONGEST_AGE = 1e6
_WIDEST_ROW_BYTES = 3 * 2 * 16 * 16 * 4
"""The widest pixel row of any family, in float32."""


class UsageError(Exception):
    """A flag, a variable or the TOML file is wrong; the message names it."""


class ServeSettings(BaseSettings):
    """Serve a model's vision tower over gRPC.

    Every flag has a same-named environment variable (--max-queued-items, VITWIRE_MAX_QUEUED_ITEMS)
    and a same-named key in the TOML file that --config FILE reads. Flag beats variable beats file.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        env_ignore_empty=True,
        cli_prog_name="vitwire-server serve",
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        nested_model_default_partial_update=False,
    )
    toml: ClassVar[Path | None] = None
    """Set for the one resolution that reads a TOML file, on a subclass of its own."""

    model: str = Field(description="directory in hub layout, or hub id")
    lora: str | None = Field(
        default=None,
        pattern=r"^[\w.-]{1,64}=.+$",
        description="NAME=DIR, a PEFT adapter whose vision weights are merged at load",
    )
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(
        default=50051, ge=0, le=65535, description="port to listen on; 0 takes a free one, which is printed"
    )
    unix_socket: Path | None = Field(
        default=None, description="listen on this Unix socket as well; with --devices, process N on PATH.N"
    )
    metrics_host: str = Field(default="127.0.0.1", description="address of /metrics and /healthz")
    metrics_port: int = Field(
        default=9464, ge=0, le=65535, description="port of /metrics and /healthz; 0 takes a free one"
    )
    metrics: CliImplicitFlag[bool] = Field(default=True, description="the status page, /metrics and /healthz at all")
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$", description="auto, cpu, cuda or cuda:N"
    )
    devices: str = Field(
        default="none",
        pattern=r"^(none|(cpu|cuda(:\d{1,3})?)(,(cpu|cuda(:\d{1,3})?))*)$",
        description="one process per device (cuda:0,cuda:1), on consecutive ports and the Unix sockets PATH.0, PATH.1; "
        "none serves --device in this one",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="what the tower computes in; auto is the checkpoint's own"
    )
    graphs: Literal["auto", "cuda", "simulated", "off"] = Field(
        default="auto", description="budget graphs; auto is cuda on CUDA, else off; simulated ones run anywhere"
    )
    budgets: str = Field(
        default="auto", description="auto, tokens of each budget (64,256,1024), or a file of vitwire-server budgets"
    )
    graph_memory: int = Field(
        default=4096 * _MIB, ge=0, description="bytes that inferred budgets may take, by estimate"
    )
    max_budget_tokens: int = Field(
        default=4096, ge=1, le=MAX_PATCHES, description="tokens of the largest budget and of an eager batch"
    )
    max_items_per_batch: int = Field(default=64, ge=1, le=MAX_ITEMS, description="items that share one forward")
    max_frames_per_batch: int = Field(
        default=512, ge=1, le=MAX_PATCHES, description="attention segments that share one forward"
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="auto: fused kernels of our own on CUDA, hot shapes compiled in bfloat16 on CPU; "
        "on: torch.compile, of blocks inside capture on CUDA; off: stock operations",
    )
    attention_backend: str = Field(
        default="auto", description="auto (the fastest that is right), sdpa, triton, varlen, cudnn, fa3 or fa4"
    )
    max_queued_items: int = Field(default=4096, ge=1, description="items admitted at once")
    max_queued_bytes: int = Field(
        default=4096 * _MIB, ge=1, description="bytes of pixels and of the rows they become, admitted at once"
    )
    max_request_bytes: int | None = Field(
        default=None,
        ge=1,
        le=MAX_MESSAGE_BYTES,
        description="bytes of one message; the largest admissible item unless set",
    )
    max_items_per_request: int = Field(default=256, ge=1, le=MAX_ITEMS, description="items of one request")
    max_patches_per_item: int = Field(default=65536, ge=4, le=MAX_PATCHES, description="patches of one item")
    cache_bytes: int = Field(default=0, ge=0, description="bytes of embeddings to keep by content; 0 keeps none")
    idle_seconds: float = Field(
        default=60.0, gt=0, allow_inf_nan=False, description="how long a client may take to send on or to read on"
    )
    max_connection_age_seconds: float = Field(
        default=300.0,
        ge=0,
        le=_LONGEST_AGE,
        description="age at which clients are asked to reconnect, so that they look up new replicas; 0 never",
    )
    canary_seconds: float = Field(
        default=10.0,
        ge=0,
        allow_inf_nan=False,
        description="idle time after which an item of our own goes through the engine; 0 never",
    )
    wedge_seconds: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        description="silence of the engine, beyond what its batch explains, after which it counts as hanging",
    )
    unresponsive_seconds: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        description="with --devices: seconds that a process may be stopped or its event loop hang before it is "
        "killed and started again",
    )
    drain_seconds: float = Field(
        default=30.0, ge=0, allow_inf_nan=False, description="how long requests in flight may take at shutdown"
    )
    lame_duck_seconds: float = Field(
        default=5.0,
        ge=0,
        allow_inf_nan=False,
        description="how long to keep serving after readiness went off at shutdown",
    )
    record_trace: Path | None = Field(
        default=None, description="append the sizes of each request's items here, for vitwire-server budgets --trace"
    )
    tls_cert: Path | None = Field(default=None, description="certificate chain in PEM; reloaded when it changes")
    tls_key: Path | None = Field(default=None, description="private key of the certificate in PEM, not encrypted")
    tls_client_ca: Path | None = Field(
        default=None, description="authority in PEM that every client's certificate has to come from (mutual TLS)"
    )
    auth_tokens_file: Path | None = Field(
        default=None, description="bearer tokens, one a line, a name after each if wanted; reloaded when it changes"
    )
    reflection: CliImplicitFlag[bool] = Field(default=True, description="gRPC server reflection")
    channelz: CliImplicitFlag[bool] = Field(
        default=False, description="gRPC channelz: sockets and calls, for debugging"
    )
    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^(https?://)?[^/\s]+/?$",
        description="OpenTelemetry collector that spans are sent to: host:4317, or https://host:4317 for TLS",
    )
    log_format: Literal["text", "json"] = Field(default="text", description="format of all lines on stderr and stdout")
    strict_config: CliImplicitFlag[bool] = Field(
        default=False, description="end with an error over unknown VITWIRE_ variables, instead of a warning"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least severity logged")

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_no_numbers(cls, value: object, info: ValidationInfo) -> object:
        """Pydantic takes `true` of TOML for 1 otherwise."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("takes no boolean")
        return value

    @field_validator("budgets", "devices", mode="before")
    @classmethod
    def _list_of_toml(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        if not value or any(isinstance(each, bool) or not isinstance(each, int | str) for each in value):
            raise ValueError("a list in TOML holds numbers or names, and at least one")
        return ",".join(map(str, value))

    @field_validator("budgets")
    @classmethod
    def _budgets_aretoken_counts(cls, value: str) -> str:
        if value != "auto":
            token_counts(value)
        return value

    @model_validator(mode="after")
    def _budgets_fit(self) -> "ServeSettings":
        sizes = self.budget_sizes
        if sizes and max(sizes) > self.max_budget_tokens:
            raise ValueError(f"budgets: {max(sizes)} is more than max_budget_tokens {self.max_budget_tokens}")
        return self

    @model_validator(mode="after")
    def _devices_fit(self) -> "ServeSettings":
        if self.device_list and self.device != "auto":
            raise ValueError(f"--device {self.device} and --devices {self.devices} exclude each other")
        last = max(self.port, self.metrics_port) + len(self.device_list) - 1
        if last > _LAST_PORT:
            raise ValueError(f"--devices: {len(self.device_list)} consecutive ports would end at {last}")
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
            raise ValueError(f"--port and --metrics-port: port {min(both)} would be needed twice ({needed})")
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> "ServeSettings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
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
        """Devices with a process of their own; empty where this one serves."""
        return [] if self.devices == "none" else self.devices.split(",")

    @property
    def port_ranges(self) -> dict[str, range]:
        """The ports to listen on by the flag that names the first; without those that the system chooses."""
        count = max(1, len(self.device_list))
        first = {"--port": self.port, "--metrics-port": self.metrics_port if self.metrics else 0}
        return {flag: range(port, port + count) for flag, port in first.items() if port}

    @property
    def budget_sizes(self) -> list[int] | None:
        """Tokens of each budget, ascending; None where they are to be inferred."""
        return None if self.budgets == "auto" else token_counts(self.budgets)

    @property
    def message_bytes(self) -> int:
        """Bound of a message's bytes that holds for every family, before the model is known."""
        return self.max_request_bytes or min(self.max_patches_per_item * _WIDEST_ROW_BYTES + _MIB, MAX_MESSAGE_BYTES)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, then TOML. Called by pydantic-settings."""
        del dotenv_settings, file_secret_settings
        if isinstance(env_settings, EnvSettingsSource):
            env_settings.env_vars = without_injected(env_settings.env_vars)
        sources = (init_settings, env_settings)
        return (*sources, TomlConfigSettingsSource(settings_cls, cls.toml)) if cls.toml else sources


def _span(ports: range) -> str:
    return str(ports[0]) if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
