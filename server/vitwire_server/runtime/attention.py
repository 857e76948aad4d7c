"""Packed attention: one function per backend, registered with transformers under its name.

transformers takes the packed branch, which has no host synchronisation, only for names that
contain `flash`. Backends are imported when they are tried, so importing this module needs none of
them. `auto` checks each that can run on the device against float32 attention, times those that are
right on the model's own shapes, and takes the fastest.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import groupby, pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from vitwire_server.runtime.graphs import CudaRecorder

_log = logging.getLogger(__name__)
_REPEATS = 5
_CALLS = 8
_FAILED: list[CudaRecorder] = []
"""Kept for the graphs that CUDA invalidated, which torch's allocator may ask after."""
_SEGMENTS = (1024, 256, 64, 256, *[0] * 28)
"""Patches of the segments that backends are checked and timed on: images of several sizes, and as many slots
as a budget for them has."""

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

    @property
    def implementation(self) -> str:
        """The name that transformers knows it by."""
        return f"vitwire_flash_{self.name}"

    def runs(self, device: torch.device, dtype: torch.dtype, head_dim: int, *, captured: bool) -> bool:
        """Whether it can serve there at all."""
        capturable = not (captured and self.syncs and device.type == "cuda")
        fits = not self.head_dims or head_dim in self.head_dims
        return device.type in self.devices and dtype in self.dtypes and fits and capturable


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend to use, and why."""

    backend: Backend
    reason: str
    attend: Attend


def _opaque(name: str, attend: Attend) -> Attend:
    """`attend`, which torch.compile does not look into: it cannot trace loops over boundaries, nor our kernels."""
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


def _varlen(impl: str | None = None) -> Attend:
    """torch's own flash attention, or one that is installed beside it; a switch for all of torch."""
    from torch.nn import attention  # noqa: PLC0415 - torch 2.10 or newer
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - torch 2.10 or newer

    if "scale" not in signature(varlen_attn).parameters:
        raise ImportError("varlen_attn of torch 2.10 takes no scale")
    if impl is not None:
        attention.activate_flash_attention_impl(impl)
    elif attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()

    def attend(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out = varlen_attn(q, k, v, boundaries, boundaries, longest, longest, scale=scale)
        assert isinstance(out, Tensor)
        return out

    return attend


def _triton() -> Attend:
    from vitwire_server.runtime.kernels.attention import segment_attention  # noqa: PLC0415 - triton comes with CUDA

    def attend(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
        return segment_attention(q, k, v, boundaries, longest, scale)

    return _opaque("segment_attention", attend)


def _cudnn() -> Attend:
    from vitwire_server.runtime.cudnn import cudnn_attention  # noqa: PLC0415 - pip install nvidia-cudnn-frontend

    return _opaque("cudnn_attention", cudnn_attention)


_HALF = (torch.bfloat16, torch.float16)
BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("sdpa", _segment_sdpa, ("cpu", "cuda"), (*_HALF, torch.float32), syncs=True),
        Backend("triton", _triton, ("cuda",), _HALF, frozenset({16, 32, 64, 72, 80, 88, 96, 128})),
        Backend("varlen", _varlen, ("cuda", "meta"), _HALF),
        Backend("cudnn", _cudnn, ("cuda",), _HALF),
        Backend("fa3", partial(_varlen, "FA3"), ("cuda",), _HALF),
        Backend("fa4", partial(_varlen, "FA4"), ("cuda",), _HALF),
    )
}


def choose(name: str, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, *, captured: bool) -> Choice:
    """Load and register the backend called `name`, or with `auto` the fastest that is right.

    Raises ValueError if there is no such backend, or if it does not run on this device and dtype.
    """
    fitting = [backend for backend in BACKENDS.values() if backend.runs(device, dtype, head_dim, captured=captured)]
    if name != "auto":
        fitting = [backend for backend in fitting if backend.name == name]
    loaded = {backend.name: attend for backend in fitting if (attend := _loaded(backend, quiet=name == "auto"))}
    if not loaded:
        known = ", ".join(f"{backend.name} ({'/'.join(backend.devices)})" for backend in BACKENDS.values())
        raise ValueError(f"attention backend {name!r} does not run on {device} in {dtype}; there are: {known}")
    chosen, reason = next(iter(loaded)), "asked for" if name != "auto" else "the only one that runs here"
    if len(loaded) > 1:
        chosen, reason = _fastest(loaded, device, dtype, heads, head_dim)
    if BACKENDS[chosen].name in ("varlen", "fa3", "fa4"):
        loaded[chosen] = BACKENDS[chosen].load()  # the flash implementation is one switch for all of torch
    AttentionInterface.register(BACKENDS[chosen].implementation, _packed(loaded[chosen]))
    _log.info("attention: %s, %s", chosen, reason)
    return Choice(BACKENDS[chosen], reason, loaded[chosen])


def _loaded(backend: Backend, *, quiet: bool) -> Attend | None:
    try:
        return backend.load()
    except (ImportError, ValueError, RuntimeError, AttributeError) as error:
        _log.log(logging.DEBUG if quiet else logging.ERROR, "attention: %s is not there: %s", backend.name, error)
        return None


def _fastest(
    loaded: dict[str, Attend], device: torch.device, dtype: torch.dtype, heads: int, head_dim: int
) -> tuple[str, str]:
    """The fastest of the backends that agree with float32 attention, and the times as the reason."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, sum(_SEGMENTS), heads, head_dim, generator=generator) * 0.5).to(device)
    boundaries = torch.tensor([0, *torch.tensor(_SEGMENTS).cumsum(0).tolist()], dtype=torch.int32, device=device)
    scale = head_dim**-0.5
    expected = segment_sdpa(q, k, v, boundaries, max(_SEGMENTS), scale)
    query, key, value = (x.to(dtype) for x in (q, k, v))
    limit = 4 * torch.finfo(dtype).eps
    seconds: dict[str, float] = {}
    for name in loaded:
        try:
            attend = BACKENDS[name].load()
            out = attend(query, key, value, boundaries, max(_SEGMENTS), scale)
            error = float((out.float() - expected).norm() / expected.norm())
            if not error <= limit:
                _log.warning("attention: %s is off by %.1e, not used", name, error)
                continue
            run = partial(attend, query, key, value, boundaries, max(_SEGMENTS), scale)
            seconds[name] = _seconds(run, device, syncs=BACKENDS[name].syncs)
        except (RuntimeError, TypeError) as failure:
            _log.warning("attention: %s failed: %s", name, str(failure).partition("\n")[0])
    if not seconds:
        raise ValueError(f"no attention backend gives right results on {device}")
    told = ", ".join(f"{name} {1e6 * each:.0f} us" for name, each in sorted(seconds.items(), key=lambda pair: pair[1]))
    return min(seconds, key=seconds.__getitem__), f"the fastest of: {told}"


def _seconds(run: Callable[[], object], device: torch.device, *, syncs: bool) -> float:
    """The median time of one call; on CUDA within a graph, where the host's part does not count."""
    calls = 1
    if device.type == "cuda" and not syncs:
        run, calls = _recorded(run, device), _CALLS
    taken = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - start) / calls)
    return median(taken[1:])


def _recorded(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """A replay of `_CALLS` calls. Raises RuntimeError for what cannot be captured."""

    def calls() -> None:
        for _ in range(_CALLS):
            run()

    recorder = CudaRecorder(torch.cuda.Stream(device))
    try:
        return recorder.record(calls)
    except RuntimeError:
        _FAILED.append(recorder)
        raise


def _packed(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    """The backend behind transformers' signature: `(1, heads, rows, head_dim)` in, rows first out."""

    def attention(
        module: nn.Module,
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
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return attend(q, k, v, cu_seq_lens_q, max_length_q, scaling).unsqueeze(0), None

    return attention
