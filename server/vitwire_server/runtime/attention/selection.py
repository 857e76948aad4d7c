"""Selection of the attention backend: the fastest that passes the accuracy check, for each band of segment lengths.

`auto` compares each backend that runs on the device with float32 attention, times those that pass on the model's
heads, and uses the fastest in each band. The result is registered with transformers under a name with `flash`: only
for such names does transformers take its packed branch, which has no host synchronisation.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from vitwire_server.runtime.attention.backends.sdpa import segment_sdpa
from vitwire_server.runtime.attention.interface import Attend
from vitwire_server.runtime.attention.registry import BACKENDS, Backend
from vitwire_server.runtime.graphs import CudaRecorder

_log = logging.getLogger(__name__)
_BANDS = (
    (128, (*[64] * 81, *[0] * 319)),
    (1024, (1024, 256, 64, 256, *[0] * 28)),
    (sys.maxsize, (4096, 1728, 1024, 836, 400, *[0] * 123)),
)
"""For each band, the largest `longest` in it, and sample segments to check and time backends on: windows, small images,
and images of several sizes, with as many slots as a budget for them has."""
_REPEATS = 5
_CALLS = 8
_FAILED_RECORDERS: list[CudaRecorder] = []
"""Kept alive: torch's allocator may still access graphs that CUDA invalidated."""


@dataclass(frozen=True, slots=True)
class LoadedBackend:
    """A backend that was imported."""

    name: str
    attend: Attend

    @property
    def isolates(self) -> bool:
        """Whether NaN and infinity stay in their segment."""
        return BACKENDS[self.name].isolates


@dataclass(frozen=True, slots=True)
class Selection:
    """The backend of each band, and the reason."""

    bands: tuple[LoadedBackend, ...]
    """For each of `_BANDS`."""
    reason: str

    @classmethod
    def only(cls, backend: LoadedBackend, reason: str) -> "Selection":
        """The same backend for all lengths."""
        return cls((backend,) * len(_BANDS), reason)

    @property
    def name(self) -> str:
        """The names of the backends without repetitions, from short segments to long ones."""
        return "+".join(dict.fromkeys(one.name for one in self.bands))

    @property
    def implementation(self) -> str:
        """The name registered with transformers."""
        return f"vitwire_flash_{self.name}"

    @property
    def lengths(self) -> list[int]:
        """For each backend, a length at which it is used."""
        return list({one.name: max(segments) for one, (_, segments) in zip(self.bands, _BANDS, strict=True)}.values())

    def at(self, longest: int) -> LoadedBackend:
        """The backend for segments of up to `longest` patches."""
        return next(one for one, (most, _) in zip(self.bands, _BANDS, strict=True) if longest <= most)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
        """As `Attend`; NaN and infinity stay in their segment."""
        one = self.at(longest)
        if not one.isolates:
            from vitwire_server.runtime.kernels.containment import contain  # noqa: PLC0415 - triton comes with CUDA

            k, v = contain(k, v)
        return one.attend(q, k, v, boundaries, longest, scale)


def select(
    name: str, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, *, captured: bool
) -> Selection:
    """Load and register the backend called `name`, or with `auto` the fastest that pass the accuracy check.

    Raises ValueError for an unknown backend, or one that does not run or is inaccurate on this device and dtype.
    """
    fitting = [backend for backend in BACKENDS.values() if backend.runs(device, dtype, head_dim, captured=captured)]
    if name != "auto":
        fitting = [backend for backend in fitting if backend.name == name]
    loaded = [one for backend in fitting if (one := _loaded(backend, quiet=name == "auto"))]
    if not loaded:
        known = ", ".join(f"{backend.name} ({'/'.join(backend.devices)})" for backend in BACKENDS.values())
        raise ValueError(f"attention backend {name!r} does not run on {device} in {dtype}; available: {known}")
    if device.type == "cuda":
        selection = _fastest(loaded, device, dtype, heads, head_dim)
    else:
        selection = Selection.only(loaded[0], "the only backend for this device")
    AttentionInterface.register(selection.implementation, _packed(selection.attend))
    _log.info("attention: %s, %s", selection.name, selection.reason)
    return selection


def _loaded(backend: Backend, *, quiet: bool) -> LoadedBackend | None:
    try:
        return LoadedBackend(backend.name, backend.load())
    except Exception as error:  # noqa: BLE001 - third-party packages may fail in any way when imported
        _log.log(logging.DEBUG if quiet else logging.ERROR, "attention: cannot load %s: %s", backend.name, error)
        return None


def _fastest(
    loaded: list[LoadedBackend], device: torch.device, dtype: torch.dtype, heads: int, head_dim: int
) -> Selection:
    """The fastest backend of each band; the reason lists the times."""
    bands: list[dict[str, float]] = []
    for _, segments in _BANDS:
        sample = _Sample.of(segments, device, dtype, heads, head_dim)
        bands.append({one.name: each for one in loaded if (each := sample.seconds(one)) is not None})
        loaded = [one for one in loaded if one.name in bands[-1]]
    if not loaded:
        raise ValueError(f"no attention backend passed the accuracy check on {device}; see the log for the errors")
    times = "; ".join(f"{max(of)} patches: {_times(band)}" for (_, of), band in zip(_BANDS, bands, strict=True))
    fastest = tuple(min(loaded, key=lambda one: band[one.name]) for band in bands)
    return Selection(fastest, f"at {times}")


def _times(seconds: Mapping[str, float]) -> str:
    ascending = sorted(seconds.items(), key=lambda pair: pair[1])
    return ", ".join(f"{name} {1e6 * each:.0f} us" for name, each in ascending)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Random rows in segments, and the result of float32 attention on them."""

    rows: tuple[Tensor, Tensor, Tensor]
    boundaries: Tensor
    longest: int
    expected: Tensor

    @classmethod
    def of(
        cls, segments: tuple[int, ...], device: torch.device, dtype: torch.dtype, heads: int, head_dim: int
    ) -> "_Sample":
        generator = torch.Generator().manual_seed(0)
        # q, k and v interleaved, as one linear layer returns them.
        rows = torch.randn(sum(segments), 3, heads, head_dim, generator=generator).mul(0.5).to(device, dtype)
        boundaries = torch.tensor([0, *torch.tensor(segments).cumsum(0).tolist()], dtype=torch.int32, device=device)
        q, k, v = rows.unbind(1)
        exact = segment_sdpa(q.float(), k.float(), v.float(), boundaries, max(segments), head_dim**-0.5)
        return cls((q, k, v), boundaries, max(segments), exact)

    def seconds(self, one: LoadedBackend) -> float | None:
        """Seconds per call; None, with a log line, if the backend fails or is inaccurate."""
        q = self.rows[0]
        run = partial(Selection.only(one, "").attend, *self.rows, self.boundaries, self.longest, q.shape[-1] ** -0.5)
        try:
            error = float((run().float() - self.expected).norm() / self.expected.norm())
            if error <= 4 * torch.finfo(q.dtype).eps:
                return _seconds(run, q.device, syncs=BACKENDS[one.name].syncs)
            _log.warning("attention: %s is not used: relative error %.1e", one.name, error)
        except Exception as failure:  # noqa: BLE001 - third-party kernels and compilers may fail in any way
            _log.warning("attention: %s failed: %s", one.name, str(failure).partition("\n")[0])
        return None


def _seconds(run: Callable[[], object], device: torch.device, *, syncs: bool) -> float:
    """Median seconds of one call; on CUDA measured in a graph, to leave out time on the host."""
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
    """A graph of `_CALLS` calls. Raises RuntimeError if it cannot be captured."""

    def calls() -> None:
        for _ in range(_CALLS):
            run()

    recorder = CudaRecorder(torch.cuda.Stream(device))
    try:
        return recorder.record(calls)
    except RuntimeError:
        _FAILED_RECORDERS.append(recorder)
        raise


def _packed(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    """`attend` in the signature of transformers: takes `(1, heads, rows, head_dim)`, returns rows first."""

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
        **_: object,  # arguments of other backends
    ) -> tuple[Tensor, None]:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return attend(q, k, v, cu_seq_lens_q, max_length_q, scaling).unsqueeze(0), None

    return attention
