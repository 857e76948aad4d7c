"""The attention backends that `--attention-backend` can name, and where each of them runs."""

from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from vitwire_server.runtime.attention.interface import Attend
from vitwire_server.runtime.devices import Architecture, architecture


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
    capability: tuple[int, int] = (0, 0)
    """The least compute capability of a CUDA device."""
    generations: frozenset[int] = frozenset()
    """Major compute capabilities that it has kernels for; empty if all from `capability` on."""

    def load(self) -> Attend:
        """Import the backend. Raises ImportError, ValueError or RuntimeError if it is not available."""
        attend: Attend = import_module(f"{__package__}.backends.{self.name}").load()
        return attend if self.traceable else _opaque(self.name, attend)

    def fault(self, device: torch.device, dtype: torch.dtype, head_dim: int, *, captured: bool) -> str:
        """Why it does not support this device, dtype or head size, `captured` by CUDA graphs; empty if it does."""
        if device.type not in self.devices:
            return f"it does not run on {device.type}"
        if dtype not in self.dtypes:
            return f"it does not compute {str(dtype).removeprefix('torch.')}"
        if self.head_dims and head_dim not in self.head_dims:
            return f"it does not support heads of {head_dim} columns"
        if device.type == "cuda" and captured and self.syncs:
            return "CUDA graphs cannot capture it"
        return self._missing(architecture(device)) if device.type == "cuda" else ""

    def _missing(self, on: Architecture) -> str:
        if on.capability < self.capability:
            return f"it needs compute capability {'{}.{}'.format(*self.capability)}, the device has {on.name}"
        if self.generations and on.capability[0] not in self.generations:
            known = ", ".join(f"{major}.x" for major in sorted(self.generations))
            return f"it has kernels for compute capability {known}, the device has {on.name}"
        return ""


def _opaque(name: str, attend: Attend) -> Attend:
    """`attend` as a custom operator under torch.compile, which cannot trace loops over boundaries."""

    def positional(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        boundaries: Tensor,
        longest: int,
        scale: float,
        key_boundaries: Tensor | None = None,
        most_keys: int = 0,
    ) -> Tensor:
        return attend(q, k, v, boundaries, longest, scale, key_boundaries=key_boundaries, most_keys=most_keys)

    operator = torch.library.custom_op(f"vitwire::{name}", positional, mutates_args=())
    operator.register_fake(lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format))

    def attended(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        boundaries: Tensor,
        longest: int,
        scale: float,
        *,
        key_boundaries: Tensor | None = None,
        most_keys: int = 0,
    ) -> Tensor:
        inner = operator if torch.compiler.is_compiling() else positional
        out: Tensor = inner(q, k, v, boundaries, longest, scale, key_boundaries, most_keys)
        return out

    return attended


_HALF = (torch.bfloat16, torch.float16)
_AMPERE = (8, 0)
BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("sdpa", ("cpu", "cuda"), (*_HALF, torch.float32), syncs=True),
        Backend("triton", ("cuda",), _HALF, frozenset({16, 32, 64, 72, 80, 88, 96, 128}), capability=_AMPERE),
        Backend("varlen", ("cuda", "meta"), _HALF, traceable=True, capability=_AMPERE),
        Backend("cudnn", ("cuda",), _HALF, isolates=False, capability=_AMPERE),
        Backend("fa3", ("cuda",), _HALF, isolates=False, generations=frozenset({9})),
        Backend("fa4", ("cuda",), _HALF, isolates=False, capability=_AMPERE),
    )
}
