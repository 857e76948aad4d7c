"""The attention backends that `--attention-backend` can name: each is imported when it is needed.

A new backend is a function that returns it here, and an entry in `BACKENDS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from vitwire_server.runtime.devices import AMPERE, architecture
from vitwire_server.runtime.kernels.operands import Attend, Segments, Tiled


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend, and where it runs."""

    name: str
    find: Callable[[], Attend]
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: frozenset[int] = frozenset()
    """Supported head sizes; empty if any."""
    syncs: bool = False
    """Whether it reads the boundaries on the host, so that CUDA graphs cannot capture it."""
    isolates: bool = True
    """Whether NaN and infinity stay in their segment; else `rowwise.contain` is applied before."""
    capability: tuple[int, int] = (0, 0)
    """The least compute capability of a CUDA device."""
    generations: frozenset[int] = frozenset()
    """Major compute capabilities that it has kernels for; empty if all from `capability` on."""

    def load(self) -> Attend:
        """Import the backend. Raises ImportError, ValueError or RuntimeError if it is not available."""
        return self.find()

    def fault(self, device: torch.device, dtype: torch.dtype, head_dim: int, *, captured: bool) -> str:
        """Why it does not support this device, dtype or head size, `captured` by CUDA graphs; empty if it does."""
        on, least = architecture(device), "{}.{}".format(*self.capability)
        known = ", ".join(f"{major}.x" for major in sorted(self.generations))
        faults = {
            f"it does not run on {device.type}": device.type not in self.devices,
            f"it does not compute {str(dtype).removeprefix('torch.')}": dtype not in self.dtypes,
            f"it does not support heads of {head_dim} columns": self.head_dims and head_dim not in self.head_dims,
            "CUDA graphs cannot capture it": device.type == "cuda" and captured and self.syncs,
            f"it needs compute capability {least}, the device has {on.name}": on.capability < self.capability,
            f"it has kernels for compute capability {known}, the device has {on.name}": self.generations
            and on.capability[0] not in self.generations,
        }
        return next((fault for fault, found in faults.items() if found), "")


def segment_sdpa(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """torch's dense attention, one call per run of equal segments; the reference on every device. As `Attend`.

    Reads the boundaries on the host.
    """
    queries = _lengths(segments.boundaries)
    keys = queries if segments.key_boundaries is None else _lengths(segments.key_boundaries)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    row = key_row = 0
    for (length, count), run in groupby(zip(queries, keys, strict=True)):
        equal = sum(1 for _ in run)
        own, others = slice(row, row + length * equal), slice(key_row, key_row + count * equal)
        if length:
            query = q[own].unflatten(0, (-1, length)).transpose(1, 2)
            key, value = (x[others].unflatten(0, (-1, count)).transpose(1, 2) for x in (k, v))
            attended = functional.scaled_dot_product_attention(query, key, value, scale=scale)
            out[own].unflatten(0, (-1, length)).copy_(attended.transpose(1, 2))
        row, key_row = own.stop, others.stop
    return out


def _lengths(boundaries: Tensor) -> list[int]:
    ends: list[int] = boundaries.tolist()
    return [right - left for left, right in pairwise(ends)]


def _triton() -> Attend:
    from vitwire_server.runtime.kernels.attention import (  # noqa: PLC0415 - triton comes with CUDA
        segment_attention,
        segment_tiles,
    )

    return Tiled(lambda segments, rows, heads, _: segment_tiles(segments, rows, heads), segment_attention)


def _varlen() -> Attend:
    """torch's `varlen_attn`. Raises ImportError before torch 2.11."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - not in torch before 2.10

    if "scale" not in signature(varlen_attn).parameters:
        raise ImportError("varlen_attn of torch 2.10 has no scale")

    def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        ends, most = segments.keys()
        out = varlen_attn(q, k, v, segments.boundaries, ends, segments.longest, most, scale=scale)
        assert isinstance(out, Tensor)
        return out

    return attend


def _hopper() -> Attend:
    from vitwire_server.runtime.kernels.hopper_attention import (  # noqa: PLC0415 - an optional package
        hopper_attention,
        hopper_tiles,
    )

    return Tiled(hopper_tiles, hopper_attention)


def _flash() -> Attend:
    """Flash attention 4. Raises ImportError if it is missing.

    torch's switch to it applies to the whole process, and in torch 2.11 to 2.13 expects two results of now five.
    """
    varlen = import_module("flash_attn.cute").flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        ends, most = segments.keys()
        bounds = {"cu_seqlens_q": segments.boundaries, "cu_seqlens_k": ends}
        lengths = {"max_seqlen_q": segments.longest, "max_seqlen_k": most}
        out = varlen(q, k, v, **bounds, **lengths, softmax_scale=scale)
        rows: Tensor = out[0] if isinstance(out, tuple) else out
        return rows

    return attend


_HALF = (torch.bfloat16, torch.float16)
_TRITON_HEADS = frozenset({16, 32, 64, 72, 80, 88, 96, 128})
_HOPPER_HEADS = frozenset({64, 72, 80, 88, 96, 128})
BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("sdpa", lambda: segment_sdpa, ("cpu", "cuda"), (*_HALF, torch.float32), syncs=True),
        Backend("triton", _triton, ("cuda",), _HALF, _TRITON_HEADS, capability=AMPERE),
        Backend("varlen", _varlen, ("cuda", "meta"), _HALF, capability=AMPERE),
        Backend("hopper", _hopper, ("cuda",), _HALF[:1], _HOPPER_HEADS, generations=frozenset({9})),
        Backend("fa4", _flash, ("cuda",), _HALF, isolates=False, capability=AMPERE),
    )
}
