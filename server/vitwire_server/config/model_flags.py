"""Settings of the model: where it comes from, and how and on which devices it is computed.

Each field is a flag, a variable, a TOML key and its help text; each class is a heading of the help.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitwire_flags.options import flag, size
from vitwire_flags.regular_files import read_regular
from vitwire_server.config.toml_file import read_toml

MAX_ITEMS = 8192
"""Most items in one message; bounds how long parsing one can block the event loop."""
MAX_PATCHES = 1 << 20
"""Most patches in one item: 1,024 images of 512 x 512 in most families, 6 GB in float32."""
MIB = 1 << 20
MAX_BYTES = 1 << 44
"""More than any host has; an address space holds several times as much."""
_MOST_BYTES_OF_A_LADDER = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ConfigurationSettings:
    """configuration"""

    config: Path | None = flag(None, "TOML file with settings", callback=read_toml, is_eager=True)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """model"""

    model: str = flag(..., "Hugging Face model id, or a checkpoint directory in Hugging Face layout")
    lora: str | None = flag(None, "PEFT adapter whose vision weights are merged at load, as NAME=DIR")

    @property
    def adapter(self) -> tuple[str, Path] | None:
        """Name and directory of the adapter to merge."""
        name, _, folder = (self.lora or "").partition("=")
        return (name, Path(folder).expanduser()) if name else None


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """device"""

    device: str = flag("auto", "auto, cpu, cuda or cuda:N")
    devices: str = flag(
        "none",
        "run one process per listed device (cuda:0,cuda:1), on consecutive ports and the Unix sockets "
        "PATH.0, PATH.1; none: serve --device in this process",
    )
    device_memory: int = size(
        0,
        "most memory of a CUDA device that the server takes, its processes, weights, graphs and embeddings included; "
        "0: no limit",
        0,
        MAX_BYTES,
    )
    rpc_processes: str = flag(
        "auto",
        "number of processes per device that serve RPCs; 1: one process serves RPCs and drives the device; "
        "auto: 1 on CPU, on CUDA up to 6 according to the cores; more than 1 needs Linux",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = flag(
        "auto", "compute dtype of the tower; auto uses the checkpoint's dtype"
    )
    pooling: Literal["none", "cls", "mean", "attention"] = flag(
        "none",
        "one vector per image, or per frame of a clip, instead of one per patch: cls, the class token; mean, the "
        "mean over the patches; attention, the model's pooling head; docs/models.md lists what models offer",
    )

    @property
    def device_list(self) -> list[str]:
        """The device of each child process; empty without `--devices`."""
        return [] if self.devices == "none" else self.devices.split(",")

    @property
    def rpc_process_count(self) -> int | None:
        """Processes per device that serve RPCs; None leaves the number to `host.rpc_processes`."""
        return None if self.rpc_processes == "auto" else int(self.rpc_processes)


@dataclass(frozen=True, kw_only=True)
class GraphSettings:
    """graphs and batches"""

    graphs: Literal["auto", "cuda", "simulated", "off"] = flag(
        "auto", "type of budget graphs; auto is cuda on a CUDA device, else off; simulated runs on any device"
    )
    budgets: str = flag(
        "learn",
        "token counts of the budgets (64,256,1024), a file written by vitwire-server budgets, auto: the "
        "model's default ladder, or learn: start with that and adapt to traffic",
    )
    state_dir: Path | None = flag(
        None, "state directory for --budgets learn; none: that of compiled kernels ($TRITON_CACHE_DIR)"
    )
    graph_memory: int = size(4096 * MIB, "estimated bytes that automatically chosen budgets may use", 0, MAX_BYTES)
    max_budget_tokens: int = flag(4096, "maximum tokens per budget and per eager batch", 1, MAX_PATCHES)
    max_items_per_batch: int = flag(64, "maximum items per forward", 1, MAX_ITEMS)
    max_frames_per_batch: int = flag(512, "maximum attention segments (frames) per forward", 1, MAX_PATCHES)
    attention_backend: str = flag(
        "auto", "sdpa, triton, varlen, hopper, fa4, or auto: the fastest that passes the accuracy check"
    )
    given: frozenset[str] = frozenset()
    """Settings that are not left at their defaults."""

    @property
    def budget_sizes(self) -> list[int] | None:
        """Tokens of each budget, ascending; None for automatic budgets. Raises ValueError."""
        return None if self.budgets in ("auto", "learn") else _token_counts(self.budgets)

    @property
    def learns(self) -> bool:
        """Whether budgets adapt to traffic, if they can."""
        return self.budgets == "learn"

    @property
    def must_learn(self) -> bool:
        """Whether that was asked for."""
        return self.learns and "budgets" in self.given


def _token_counts(text: str) -> list[int]:
    """The token counts, ascending. Raises ValueError."""
    fault, file = "expected auto, learn, a list of token counts such as 64,256,1024, or an existing file", None
    with suppress(OSError):  # a long list is too long for a path
        file = Path(text) if Path(text).is_file() else None
    counts = text
    if file:
        fault = "not a file written by vitwire-server budgets"
        try:
            counts = ",".join(map(str, json.loads(read_regular(file, _MOST_BYTES_OF_A_LADDER))["budgets"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--budgets: {fault}: {error!r}") from None
    try:
        sizes = sorted({int(size) for size in counts.strip("[]").split(",")})
    except ValueError:
        raise ValueError(f"--budgets: {fault} (got {text!r})") from None
    if sizes[0] < 1:
        raise ValueError("--budgets: a budget needs at least 1 token")
    return sizes
