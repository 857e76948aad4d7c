"""cuDNN's attention over ragged segments, through NVIDIA's Python frontend (nvidia-cudnn-frontend).

torch's own call to it builds a plan every time, which takes 37 ms and cannot be captured. Here a plan is built once
per shape, in about 40 ms, and shapes are rounded up so that there are few. The first eager forward of a rounded shape
pays for its plan; `auto` does not count this.
"""

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import cudnn
import torch
from torch import Tensor

from vitwire_server.runtime.kernels.operands import Segments

_SHORTEST = 64
# The frontend has no type information.
Untyped: TypeAlias = Any
_TYPES = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}


@dataclass(frozen=True, slots=True)
class Shape:
    """The key of a plan."""

    device: torch.device
    dtype: torch.dtype
    slots: int
    longest: int
    most_keys: int
    heads: int
    head_dim: int
    strides: tuple[int, int, int]
    """Elements from one row of q, k and v to the next."""
    scale: float


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """As `Attend`. Each row must be contiguous. The first call with a shape must be outside of graph capture."""
    rows, heads, head_dim = q.shape
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    boundaries, longest, key_boundaries, most_keys = segments
    slots, most = _rounded(len(boundaries) - 1), max(_SHORTEST, _rounded(longest))
    strides = (q.stride(0), k.stride(0), v.stride(0))
    ends = key_ends = _padded(boundaries, slots)
    keys = most
    if key_boundaries is not None:
        keys, key_ends = max(_SHORTEST, _rounded(most_keys)), _padded(key_boundaries, slots)
    plan = _plan(Shape(q.device, q.dtype, slots, most, keys, heads, head_dim, strides, scale))
    # an offset counts elements
    own, of_keys = ends.long(), key_ends.long()
    offsets = [own * strides[0], of_keys * strides[1], of_keys * strides[2], own * (heads * head_dim)]
    plan(q, k, v, *offsets, ends.diff(), key_ends.diff(), out)
    return out


def _padded(boundaries: Tensor, slots: int) -> Tensor:
    """With empty slots behind the others."""
    return torch.cat([boundaries, boundaries[-1:].expand(slots + 1 - len(boundaries))])


def _rounded(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


@cache
def _plan(shape: Shape) -> Callable[..., None]:
    """The plan of a shape, kept for good, as graphs may replay its kernels: called, it runs on the current stream.

    It takes q, k, v, their offsets, the output's offsets, lengths of q and k, and the output. Raises RuntimeError if
    cuDNN does not support the shape.
    """
    handle = _handle(shape.device)
    graph = cudnn.pygraph(
        io_data_type=_TYPES[shape.dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    dim = [shape.slots, shape.heads, shape.longest, shape.head_dim]

    def rows(name: str, longest: int, stride: int) -> Untyped:
        sizes = [shape.slots, shape.heads, longest, shape.head_dim]
        strides = [longest * stride, shape.head_dim, stride, 1]
        return graph.tensor(name=name, dim=sizes, stride=strides, data_type=_TYPES[shape.dtype])

    def counts(name: str, count: int, kind: Untyped) -> Untyped:
        return graph.tensor(name=name, dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind)

    longest = (shape.longest, shape.most_keys, shape.most_keys)
    q, k, v = (rows(*each) for each in zip("qkv", longest, shape.strides, strict=True))
    offsets = [counts(f"{name}_offsets", shape.slots + 1, cudnn.data_type.INT64) for name in ("q", "k", "v", "out")]
    lengths, key_lengths = (counts(name, shape.slots, cudnn.data_type.INT32) for name in ("lengths", "key_lengths"))
    for tensor, offset in zip((q, k, v), offsets, strict=False):
        tensor.set_ragged_offset(offset)
    out, _ = graph.sdpa(
        name="attention",
        q=q,
        k=k,
        v=v,
        generate_stats=False,
        attn_scale=shape.scale,
        use_padding_mask=True,
        seq_len_q=lengths,
        seq_len_kv=key_lengths,
    )
    width = shape.heads * shape.head_dim
    out.set_output(True).set_dim(dim).set_stride([shape.longest * width, shape.head_dim, width, 1])
    out.set_ragged_offset(offsets[-1])
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    known, nbytes = (q, k, v, *offsets, lengths, key_lengths, out), max(1, graph.get_workspace_size())

    def run(*tensors: Tensor) -> None:
        workspace = torch.empty(nbytes, dtype=torch.uint8, device=shape.device)
        cudnn.set_stream(handle, torch.cuda.current_stream(shape.device).cuda_stream)
        graph.execute(dict(zip(known, tensors, strict=True)), workspace, handle=handle)

    return run


@cache
def _handle(device: torch.device) -> Untyped:
    with torch.cuda.device(device):
        return cudnn.create_handle()


@atexit.register
def _clear() -> None:
    """Free plans and handles before the frontend is unloaded; else it prints errors."""
    _plan.cache_clear()
    _handle.cache_clear()
