"""What a CUDA device offers a kernel: by it tiles and backends are chosen, without a list of models."""

from dataclasses import dataclass
from functools import lru_cache

import torch

BFLOAT16_CAPABILITY = (8, 0)
"""The first that multiplies bfloat16."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Limits and instructions of a device."""

    capability: tuple[int, int]
    """Its compute capability: 8.0 and 8.6 Ampere, 8.9 Ada, 9.0 Hopper, 10.0 and 12.0 Blackwell."""
    processors: int
    """Multiprocessors."""
    block_bytes: int
    """Shared memory that one program may have."""

    @property
    def multiplies_from_shared(self) -> bool:
        """Whether matrix units read their operands from shared memory (wgmma of Hopper, tcgen05 of 10.x)."""
        return self.capability[0] in (9, 10, 11)

    @property
    def name(self) -> str:
        """The capability as NVIDIA writes it."""
        return "{}.{}".format(*self.capability)


HOPPER = Architecture((9, 0), 132, 227 << 10)
"""H100 and H200, of which kernels were measured; in the place of a device that is not CUDA."""


@lru_cache
def architecture(device: torch.device) -> Architecture:
    """That of a CUDA device; Hopper's for Triton's interpreter on a CPU."""
    if device.type != "cuda":
        return HOPPER
    found = torch.cuda.get_device_properties(device)
    block_bytes: int = found.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing in torch's stubs
    return Architecture((found.major, found.minor), found.multi_processor_count, block_bytes)


def dtype_fault(dtype: torch.dtype, device: torch.device) -> str:
    """Why a device does not compute in `dtype`, and what to do; empty if it does."""
    if device.type != "cuda" or dtype is not torch.bfloat16 or architecture(device).capability >= BFLOAT16_CAPABILITY:
        return ""
    model = f"{torch.cuda.get_device_name(device)}, compute capability {architecture(device).name}"
    remedy = "serve with --dtype float16 or --dtype float32"
    return f"{device} ({model}) does not compute bfloat16, which needs 8.0 or newer; {remedy}"


def graph_fault(device: torch.device) -> str:
    """Why a CUDA device gets no graphs by default; empty if it does."""
    found = architecture(device)
    if found.capability >= BFLOAT16_CAPABILITY:
        return ""
    return f"graphs need attention that they can capture, and none runs on compute capability {found.name}, below 8.0"
