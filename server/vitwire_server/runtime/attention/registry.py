"""The attention backends that `--attention-backend` can name, and where each of them runs."""

from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from vitwire_server.runtime.attention.interface import Attend


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend: its name is that of its file in `backends/`."""

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: frozenset[int] = frozenset()
    """Supported head sizes; empty if any."""
    syncs: bool = False
    """Whether it reads the boundaries on the host, so that CUDA graphs cannot capture it."""
    isolates: bool = True
    """Whether NaN and infinity stay in their segment; else `containment.contain` is applied before."""
    traceable: bool = False
    """Whether torch.compile can trace it; else it becomes a custom operator."""

    def load(self) -> Attend:
        """Import the backend. Raises ImportError, ValueError or RuntimeError if it is not available."""
        attend: Attend = import_module(f"{__package__}.backends.{self.name}").load()
        return attend if self.traceable else _opaque(self.name, attend)

    def runs(self, device: torch.device, dtype: torch.dtype, head_dim: int, *, captured: bool) -> bool:
        """Whether it supports this device, dtype and head size; `captured` by CUDA graphs."""
        capturable = not (captured and self.syncs and device.type == "cuda")
        fits = not self.head_dims or head_dim in self.head_dims
        return device.type in self.devices and dtype in self.dtypes and fits and capturable


def _opaque(name: str, attend: Attend) -> Attend:
    """`attend` as a custom operator under torch.compile, which cannot trace loops over boundaries."""
    operator = torch.library.custom_op(f"vitwire::{name}", attend, mutates_args=())
    operator.register_fake(lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format))

    def attended(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
        inner = operator if torch.compiler.is_compiling() else attend
        out: Tensor = inner(q, k, v, boundaries, longest, scale)
        return out

    return attended


_HALF = (torch.bfloat16, torch.float16)
BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("sdpa", ("cpu", "cuda"), (*_HALF, torch.float32), syncs=True),
        Backend("triton", ("cuda",), _HALF, frozenset({16, 32, 64, 72, 80, 88, 96, 128})),
        Backend("varlen", ("cuda", "meta"), _HALF, traceable=True),
        Backend("cudnn", ("cuda",), _HALF, isolates=False),
        Backend("fa3", ("cuda",), _HALF, isolates=False),
        Backend("fa4", ("cuda",), _HALF, isolates=False),
    )
}
