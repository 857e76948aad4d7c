"""Packed attention: one function per backend, registered with transformers under its name.

transformers takes the packed branch, which has no host synchronisation, only for names that
contain `flash`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

Attention = Callable[..., tuple[Tensor, None]]


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to attend within packed segments."""

    name: str
    attend: Attention
    devices: tuple[str, ...]

    @property
    def implementation(self) -> str:
        """The name that transformers knows it by."""
        return f"vitwire_flash_{self.name}"


def segment_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **_: Any,  # noqa: ANN401 - transformers passes what other backends need
) -> tuple[Tensor, None]:
    """Dense attention per segment, one call for each run of equal segments.

    `query`, `key`, `value` are `(1, heads, rows, head_dim)`; returns `(1, rows, heads, head_dim)`.
    Reads the boundaries on the host, so it is for CPU only.
    """
    ends: list[int] = cu_seq_lens_q.tolist()
    out = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
    start = 0
    for length, run in groupby(right - left for left, right in pairwise(ends)):
        stop = start + length * sum(1 for _ in run)
        if length:
            q, k, v = (x[0, :, start:stop].unflatten(1, (-1, length)).transpose(0, 1) for x in (query, key, value))
            attended = functional.scaled_dot_product_attention(q, k, v, scale=scaling)
            out[start:stop].unflatten(0, (-1, length)).copy_(attended.transpose(1, 2))
        start = stop
    return out.unsqueeze(0), None


def varlen(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,  # noqa: ANN401 - transformers passes what other backends need
) -> tuple[Tensor, None]:
    """torch's variable-length flash attention; shapes as in `segment_sdpa`, boundaries on the device."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - needs torch 2.10 and flash kernels

    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    out = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling)
    assert isinstance(out, Tensor)
    return out.unsqueeze(0), None


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("sdpa", segment_sdpa, devices=("cpu",)),
        Backend("varlen", varlen, devices=("cuda", "meta")),
    )
}


def choose(name: str, device: torch.device) -> Backend:
    """The backend called `name`, or with `auto` the first that runs on `device`; registers it.

    Raises ValueError if there is no such backend, or if it does not run on `device`.
    """
    fitting = [backend for backend in BACKENDS.values() if device.type in backend.devices]
    if name != "auto":
        fitting = [backend for backend in fitting if backend.name == name]
    if not fitting:
        known = ", ".join(f"{b.name} ({'/'.join(b.devices)})" for b in BACKENDS.values())
        raise ValueError(f"attention backend {name!r} does not run on {device}; there are: {known}")
    AttentionInterface.register(fitting[0].implementation, fitting[0].attend)
    return fitting[0]
