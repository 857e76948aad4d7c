"""Settings of the model: where it comes from, and how and on which devices it is computed.

Each field is a flag, a variable, a TOML key and its help text; each class is a heading of the help.
"""

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from vitwire_server.config.sources import SourcedSettings
from vitwire_server.core.files import read_regular

MAX_ITEMS = 8192
"""Most items in one message; bounds how long parsing one can block the event loop."""
MAX_PATCHES = 1 << 20
"""Most patches in one item: 1,024 images of 512 x 512 in most families, 6 GB in float32."""
MIB = 1 << 20
MAX_BYTES = 1 << 44
"""More than any host has; an address space holds several times as much."""
_MAX_RPC_PROCESSES = 64
"""Per device."""
_MOST_BYTES_OF_A_LADDER = 1 << 20
Bytes: TypeAlias = Annotated[int, Field(ge=0, le=MAX_BYTES)]


def auto_or(least: int, most: int) -> BeforeValidator:
    """Accepts auto or a number within bounds, of which more than the least need Linux."""

    def checked(value: object) -> object:
        text = str(value)
        if text != "auto" and not (re.fullmatch(r"\d{1,4}", text, re.ASCII) and least <= int(text) <= most):
            raise ValueError(f"expected auto or a number from {least} to {most}")
        if text not in {"auto", str(least)} and sys.platform != "linux":
            raise ValueError(f"more than {least} needs Linux")
        return text

    return BeforeValidator(checked)


def _joined(value: object) -> object:
    """A TOML list as a flag has it."""
    if not isinstance(value, list):
        return value
    if not value or any(isinstance(each, bool) or not isinstance(each, int | str) for each in value):
        raise ValueError("a TOML list needs at least one element, all of them numbers or names")
    return ",".join(map(str, value))


def _token_counts(text: str) -> list[int]:
    """The token counts, ascending. Raises ValueError."""
    fault, file = "expected auto, learn, a list of token counts such as 64,256,1024, or an existing file", None
    with suppress(OSError):  # a long list is too long for a path
        file = Path(text) if Path(text).is_file() else None
    if file:
        fault = "not a file written by vitwire-server budgets"
        try:
            text = ",".join(map(str, json.loads(read_regular(file, _MOST_BYTES_OF_A_LADDER))["budgets"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{fault}: {error!r}") from None
    try:
        sizes = sorted({int(size) for size in text.strip("[]").split(",")})
    except ValueError:
        raise ValueError(fault) from None
    if sizes[0] < 1:
        raise ValueError("a budget needs at least 1 token")
    return sizes


def _checked_budgets(value: str) -> str:
    if value not in ("auto", "learn"):
        _token_counts(value)
    return value


List: TypeAlias = Annotated[str, BeforeValidator(_joined)]


class ModelSettings(SourcedSettings):
    """model"""

    model: str = Field(description="Hugging Face model id, or a checkpoint directory in Hugging Face layout")
    lora: str | None = Field(
        default=None,
        pattern=r"^[\w.-]{1,64}=.+$",
        description="PEFT adapter whose vision weights are merged at load, as NAME=DIR",
    )

    @property
    def adapter(self) -> tuple[str, Path] | None:
        """Name and directory of the adapter to merge."""
        name, _, folder = (self.lora or "").partition("=")
        return (name, Path(folder).expanduser()) if name else None


class DeviceSettings(SourcedSettings):
    """device"""

    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$", description="auto, cpu, cuda or cuda:N"
    )
    devices: List = Field(
        default="none",
        pattern=r"^(none|(cpu|cuda(:\d{1,3})?)(,(cpu|cuda(:\d{1,3})?))*)$",
        description="run one process per listed device (cuda:0,cuda:1), on consecutive ports and the Unix sockets "
        "PATH.0, PATH.1; none: serve --device in this process",
    )
    rpc_processes: Annotated[str, auto_or(1, _MAX_RPC_PROCESSES)] = Field(
        default="auto",
        description="number of processes per device that serve RPCs; 1: the process that drives the device does both; "
        "auto: 1 on CPU, on CUDA up to 6 according to the cores; more than 1 needs Linux",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="compute dtype of the tower; auto uses the checkpoint's dtype"
    )
    pooling: Literal["none", "cls", "mean", "attention"] = Field(
        default="none",
        description="one vector per image, or per frame of a clip, instead of one per patch: cls, the class token; "
        "mean, the mean over the patches; attention, the model's pooling head; docs/models.md lists what models offer",
    )

    @property
    def device_list(self) -> list[str]:
        """The device of each child process; empty without `--devices`."""
        return [] if self.devices == "none" else self.devices.split(",")

    @property
    def rpc_process_count(self) -> int | None:
        """Processes per device that serve RPCs; None leaves the number to `host.rpc_processes`."""
        return None if self.rpc_processes == "auto" else int(self.rpc_processes)


class GraphSettings(SourcedSettings):
    """graphs and batches"""

    graphs: Literal["auto", "cuda", "simulated", "off"] = Field(
        default="auto",
        description="type of budget graphs; auto is cuda on a CUDA device, else off; simulated runs on any device",
    )
    budgets: Annotated[List, AfterValidator(_checked_budgets)] = Field(
        default="learn",
        description="token counts of the budgets (64,256,1024), a file written by vitwire-server budgets, auto: the "
        "model's default ladder, or learn: start with that and adapt to traffic",
    )
    state_dir: Path | None = Field(
        default=None,
        description="state directory for --budgets learn; none: that of compiled kernels ($TRITON_CACHE_DIR)",
    )
    graph_memory: Bytes = Field(
        default=4096 * MIB, description="estimated bytes that automatically chosen budgets may use"
    )
    max_budget_tokens: int = Field(
        default=4096, ge=1, le=MAX_PATCHES, description="maximum tokens per budget and per eager batch"
    )
    max_items_per_batch: int = Field(default=64, ge=1, le=MAX_ITEMS, description="maximum items per forward")
    max_frames_per_batch: int = Field(
        default=512, ge=1, le=MAX_PATCHES, description="maximum attention segments (frames) per forward"
    )
    attention_backend: str = Field(
        default="auto",
        description="sdpa, triton, varlen, hopper, fa3, fa4, or auto: the fastest that passes the accuracy check",
    )

    @model_validator(mode="after")
    def _budgets_fit(self) -> Self:
        sizes = self.budget_sizes
        if sizes and max(sizes) > self.max_budget_tokens:
            raise ValueError(f"budgets: {max(sizes)} is more than max_budget_tokens {self.max_budget_tokens}")
        return self

    @property
    def budget_sizes(self) -> list[int] | None:
        """Tokens of each budget, ascending; None for automatic budgets."""
        return None if self.budgets in ("auto", "learn") else _token_counts(self.budgets)

    @property
    def learns(self) -> bool:
        """Whether budgets adapt to traffic, if they can."""
        return self.budgets == "learn"

    @property
    def must_learn(self) -> bool:
        """Whether that was asked for."""
        return self.learns and "budgets" in self.model_fields_set
