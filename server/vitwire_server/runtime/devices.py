"""The limits of a CUDA device, by which tiles and backends are chosen, without a list of models."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

from vitwire_server.runtime.toolchain import triton_fault

AMPERE = (8, 0)
"""The first that multiplies bfloat16; Triton and flash attention support no older ones."""


class Architecture(NamedTuple):
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
    """The architecture of a CUDA device; Hopper's for Triton's interpreter on a CPU."""
    if device.type != "cuda":
        return HOPPER
    found = torch.cuda.get_device_properties(device)
    block_bytes: int = found.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing in torch's stubs
    return Architecture((found.major, found.minor), found.multi_processor_count, block_bytes)


def dtype_fault(dtype: torch.dtype, device: torch.device) -> str:
    """Why a device does not compute in `dtype`, and what to do; empty if it does."""
    if device.type != "cuda" or dtype is not torch.bfloat16 or architecture(device).capability >= AMPERE:
        return ""
    model = f"{torch.cuda.get_device_name(device)}, compute capability {architecture(device).name}"
    remedy = "serve with --dtype float16 or --dtype float32"
    return f"{device} ({model}) does not compute bfloat16, which needs 8.0 or newer; {remedy}"


def kernel_fault(device: torch.device) -> str:
    """Why a CUDA device runs neither Vitwire's kernels nor attention that graphs can capture; empty if it does."""
    found = architecture(device)
    if found.capability >= AMPERE:
        return ""
    return f"kernels and captured attention need compute capability 8.0, the device has {found.name}"


def memory(device: torch.device, graphs: int) -> dict[str, int]:
    """Bytes of a CUDA device by kind; `graphs` is what capturing them took. Raises RuntimeError."""
    free, total = torch.cuda.mem_get_info(device)
    reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return {"total": total, "free": free, "reserved": reserved, "used": used, "graphs": graphs}


def unavailable(device: torch.device, backends: Mapping[str, str], *, graphs: bool) -> dict[str, str]:
    """Attention `backends`, graphs and fused blocks that the device or installation lacks, each with the reason."""
    if device.type != "cuda":
        return {}
    kernels = kernel_fault(device)
    faults = {"graphs": "" if graphs else kernels, "fused blocks": kernels or triton_fault()}
    return {name: why for name, why in (*faults.items(), *backends.items()) if why}
