"""Attention within packed segments: one function per backend, each imported only when it is asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import signature
from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn import functional

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]
"""`q, k, v (rows, heads, head_dim)`, boundaries `(segments + 1,)` int32, longest, scale; rows like `q`."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to attend within packed segments."""

    name: str
    load: Callable[[], Attend]
    """Imports what it needs. Raises ImportError, ValueError or RuntimeError where that is not there."""
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: frozenset[int] = frozenset()
    """Sizes of a head that it was made for; empty if any."""
    syncs: bool = False
    """Reads the boundaries on the host, so it cannot be captured on CUDA."""
    isolates: bool = True
    """Values that are not finite stay in their segment; else `containment.contain` has to see to it before."""

    def runs(self, device: torch.device, dtype: torch.dtype, head_dim: int, *, captured: bool) -> bool:
        """Whether it can serve there at all."""
        capturable = not (captured and self.syncs and device.type == "cuda")
        fits = not self.head_dims or head_dim in self.head_dims
        return device.type in self.devices and dtype in self.dtypes and fits and capturable


def _opaque(name: str, attend: Attend) -> Attend:
    """`attend`, which torch.compile does not look into: it cannot trace loops over boundaries."""
    operator = torch.library.custom_op(f"vitwire::{name}", attend, mutates_args=())
    operator.register_fake(lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format))

    def attended(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
        within = operator if torch.compiler.is_compiling() else attend
        out: Tensor = within(q, k, v, boundaries, longest, scale)
        return out

    return attended


def _segment_sdpa() -> Attend:
    return _opaque("segment_sdpa", segment_sdpa)


def segment_sdpa(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
    """Dense attention per segment, one call for each run of equal segments; boundaries read on the host."""
    del longest
    ends: list[int] = boundaries.tolist()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    start = 0
    for length, run in groupby(right - left for left, right in pairwise(ends)):
        stop = start + length * sum(1 for _ in run)
        if length:
            part = slice(start, stop)
            query, key, value = (x[part].unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
            attended = functional.scaled_dot_product_attention(query, key, value, scale=scale)
            out[part].unflatten(0, (-1, length)).copy_(attended.transpose(1, 2))
        start = stop
    return out


def _varlen() -> Attend:
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - torch 2.10 or newer

    if "scale" not in signature(varlen_attn).parameters:
        raise ImportError("varlen_attn of torch 2.10 takes no scale")

    def attend(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out = varlen_attn(q, k, v, boundaries, boundaries, longest, longest, scale=scale)
        assert isinstance(out, Tensor)
        return out

    return attend


def _flash(name: str, module: str) -> Attend:
    """Flash attention 3 or 4 of Dao's project, called as it is installed.

    torch's own switch to them makes one choice for the whole process, and that of torch 2.11 and 2.13 expects two
    results where flash attention 4 now gives five.
    """
    varlen = import_module(module).flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
        bounds = {"cu_seqlens_q": boundaries, "cu_seqlens_k": boundaries}
        out = varlen(q, k, v, **bounds, max_seqlen_q=longest, max_seqlen_k=longest, softmax_scale=scale)
        rows: Tensor = out[0] if isinstance(out, tuple) else out
        return rows

    return _opaque(name, attend)


def _triton() -> Attend:
    from vitwire_server.runtime.kernels.attention import segment_attention  # noqa: PLC0415 - triton comes with CUDA

    def attend(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
        return segment_attention(q, k, v, boundaries, longest, scale)

    return _opaque("segment_attention", attend)


def _cudnn() -> Attend:
    from vitwire_server.runtime.attention.cudnn import cudnn_attention  # noqa: PLC0415 - pip install nvidia-cudnn-frontend

    return _opaque("cudnn_attention", cudnn_attention)


_HALF = (torch.bfloat16, torch.float16)
BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("sdpa", _segment_sdpa, ("cpu", "cuda"), (*_HALF, torch.float32), syncs=True),
        Backend("triton", _triton, ("cuda",), _HALF, frozenset({16, 32, 64, 72, 80, 88, 96, 128})),
        Backend("varlen", _varlen, ("cuda", "meta"), _HALF),
        Backend("cudnn", _cudnn, ("cuda",), _HALF, isolates=False),
        Backend("fa3", partial(_flash, "fa3", "flash_attn_interface"), ("cuda",), _HALF, isolates=False),
        Backend("fa4", partial(_flash, "fa4", "flash_attn.cute"), ("cuda",), _HALF, isolates=False),
    )
}
