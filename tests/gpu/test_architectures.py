"""Each kernel compiled ahead of time for each generation of devices, by the ptxas of Triton's wheel; needs no GPU.

What is launched is compiled: the kernels' own callers run on CPU tensors, with a driver that only names a target.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from vitwire_server.preparing.device.kernels import follow
from vitwire_server.preparing.device.planes import convert
from vitwire_server.preparing.device.tables import Field
from vitwire_server.runtime.devices import Architecture
from vitwire_server.runtime.kernels import attention, rotary
from vitwire_server.runtime.kernels import norms as adding
from vitwire_server.runtime.kernels.norms import Norm, add_norm
from vitwire_server.runtime.kernels.operands import Segments, attention_division, attention_tile, fitting_groups
from vitwire_server.runtime.kernels.rotary import rotate
from vitwire_server.runtime.kernels.rowwise import KINDS, activate, contain, copy_checked, interpolated

ARCHITECTURES = {
    80: Architecture((8, 0), 108, 163 << 10),
    86: Architecture((8, 6), 84, 99 << 10),
    89: Architecture((8, 9), 128, 99 << 10),
    90: Architecture((9, 0), 132, 227 << 10),
    100: Architecture((10, 0), 148, 227 << 10),
    120: Architecture((12, 0), 170, 99 << 10),
}
"""CUDA C Programming Guide, technical specifications per compute capability: shared memory per thread block."""
MOST_SPILLED = 160
"""Bytes of a thread's registers in local memory: on Hopper 24 for heads of 72 columns and 152 for 128, as measured."""
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
HEADS = 16
HOPPER = "vitwire_server.runtime.kernels.hopper_attention"


class Target:
    """A driver without a device."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return -self._capability  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(params=list(ARCHITECTURES), ids=lambda capability: f"sm{capability}")
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Architecture]:
    if triton.knobs.runtime.interpret:
        pytest.skip("Triton's interpreter does not compile")
    monkeypatch.setattr(attention, "architecture", lambda _: ARCHITECTURES[request.param])
    for module in (attention, rotary, adding):
        monkeypatch.setattr(module, "is_dependent", lambda _: ARCHITECTURES[request.param].capability >= (9, 0))
    before = driver._active
    driver.set_active(Target(request.param))
    yield ARCHITECTURES[request.param]
    driver.set_active(before)


@pytest.fixture
def compiled(on: Architecture, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The kernels that were launched, compiled, by their names."""
    kernels: dict[str, Any] = {}
    run = jit.JITFunction.run

    def compiling(self: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
        kernels[self.fn.__name__] = run(self, *arguments, warmup=True, **options)
        return kernels[self.fn.__name__]

    monkeypatch.setattr(jit.JITFunction, "run", compiling)
    return kernels


def check(kernel: Any, on: Architecture, folder: Path) -> None:
    """Its shared memory fits, and its registers hold about everything."""
    assert kernel.metadata.shared <= on.block_bytes
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    said = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    assert int(found[1]) * kernel.metadata.num_warps * 32 <= 65536, "registers of a multiprocessor"
    assert int(found[2]) <= MOST_SPILLED


@pytest.mark.parametrize("rows", [64, 784, 65536])
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_attention(head_dim: int, rows: int, on: Architecture, compiled: dict[str, Any], tmp_path: Path) -> None:
    qkv = torch.zeros(1, 3, HEADS, head_dim, dtype=torch.bfloat16).expand(rows, -1, -1, -1)
    attention.segment_attention(*qkv.unbind(1), Segments(torch.tensor([0, rows], dtype=torch.int32), 784), 0.1)
    assert set(compiled) == {"_map", "_attend"}
    for kernel in compiled.values():
        check(kernel, on, tmp_path)
    tile = attention_tile(attention_division(rows, HEADS, 784, on), head_dim, 2, on)
    assert compiled["_attend"].metadata.shared <= tile.shared_bytes(2, on), "the rule counts all of it"


@pytest.mark.parametrize(
    ("head_dim", "groups"), [(size, groups) for size in (64, 72, 96, 128) for groups in fitting_groups(size)]
)
def test_attention_for_hopper(head_dim: int, groups: int, tmp_path: Path) -> None:
    """By NVIDIA's CuTe DSL, for Hopper only."""
    pytest.importorskip("cutlass")
    script = f"import {HOPPER} as found; found._compile({head_dim}, {groups}, True, 0)"
    kept = {"CUTE_DSL_DUMP_DIR": str(tmp_path), "CUTE_DSL_KEEP_CUBIN": "1", "QUACK_CACHE_ENABLED": "0"}
    environment = os.environ | kept | {"CUTE_DSL_ARCH": "sm_90a"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)
    (cubin,) = tmp_path.glob("*.cubin")
    usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    assert int(stack) <= MOST_SPILLED, usage


def rotation() -> None:
    rotate(torch.zeros(64, 3, HEADS, 72, dtype=torch.bfloat16), *torch.zeros(2, 64, 72), contain=True)


def norms() -> None:
    rows = torch.zeros(64, 1152, dtype=torch.bfloat16)
    norm = nn.LayerNorm(1152, dtype=torch.bfloat16)
    add_norm(rows, rows, Norm.of(norm), ahead=norm.bias.data)


def overlapping_norms() -> None:
    norm = nn.LayerNorm(1152, dtype=torch.bfloat16)
    rows, bias = torch.zeros(64, 1152, dtype=torch.bfloat16), norm.bias.data
    add_norm(rows, rows, Norm.of(norm), ahead=bias, factor=bias, overlapping=True)


def checked_copies() -> None:
    rows = torch.zeros(64, 16384, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        copy_checked(rows, torch.empty_like(rows, dtype=dtype), torch.empty(64, dtype=torch.bool))


def rms_norms() -> None:
    norm = nn.RMSNorm(1280, eps=1e-6, dtype=torch.bfloat16)
    add_norm(torch.zeros(64, 1280, dtype=torch.bfloat16), None, Norm.of(norm))


def containment() -> None:
    contain(*torch.zeros(2, 64, HEADS, 72, dtype=torch.bfloat16))


def activations() -> None:
    for kind in KINDS:
        activate(torch.zeros(64, 4304, dtype=torch.bfloat16), kind, gated=kind == "silu")


def positions() -> None:
    table = torch.zeros(2304, 1152, dtype=torch.bfloat16)
    interpolated(table, torch.zeros(64, 4, dtype=torch.int64), torch.zeros(64, 4))


def planes() -> None:
    convert(
        *(torch.zeros(shape, dtype=torch.uint8) for shape in ((4, 98), (2, 49, 2))),
        (1,) * 6,
        torch.zeros(4, 98, 3, dtype=torch.uint8),
    )


@pytest.mark.parametrize(
    "launch",
    [
        rotation,
        norms,
        overlapping_norms,
        rms_norms,
        containment,
        activations,
        checked_copies,
        positions,
        planes,
    ],
)
def test_kernels_between_products(
    launch: Callable[[], None], on: Architecture, compiled: dict[str, Any], tmp_path: Path
) -> None:
    launch()
    assert compiled
    for kernel in compiled.values():
        check(kernel, on, tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_preparation(dtype: torch.dtype, on: Architecture, compiled: dict[str, Any], tmp_path: Path) -> None:
    """Products are rounded before they are summed, as torch rounds them."""
    follow(torch.zeros(1, len(Field), dtype=torch.int64), (8, 64), dtype, torch.zeros(1, 2, 3))
    check(compiled["_follow"], on, tmp_path)
    assert "fma" not in compiled["_follow"].asm["ptx"]
    assert ("mul.rn.f32" in compiled["_follow"].asm["ptx"]) == (dtype is not torch.uint8)
