"""Programmatic dependent launch: a kernel is placed on the device while the kernel before it still runs.

Each kernel that is launched this way waits with `begin` before it reads or writes what another kernel writes or reads.
As every program waits, a kernel ends after the one before it, and all kernels before a wait are done after it. Weights
may be read before the wait: no kernel writes them.
"""

from dataclasses import fields
from functools import lru_cache

import torch
import triton
from triton import language as tl
from triton.backends.nvidia.compiler import CUDAOptions
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_FIRST_CAPABILITY = (9, 0)


@lru_cache
def is_dependent(device: torch.device) -> bool:
    """Whether the device and this Triton support it: Hopper and newer."""
    return (
        device.type == "cuda"
        and "launch_pdl" in {field.name for field in fields(CUDAOptions)}
        and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
    )


def constants_of(dependent: bool) -> dict[str, bool]:
    """By name, of a kernel that waits or does not."""
    return {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}


@triton.jit
def begin(DEPENDENT: tl.constexpr) -> None:
    """Wait for the kernels before this one."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def end(DEPENDENT: tl.constexpr) -> None:
    """Let the next kernel be placed: the rest of the program is short."""
    if DEPENDENT:
        gdc_launch_dependents()
