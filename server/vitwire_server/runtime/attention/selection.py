"""Selection of the attention backend: the fastest that passes the accuracy check, for each band of segment lengths.

`auto` compares each backend that runs on the device with float32 attention, times those that pass on the model's
heads, and uses the fastest in each band. The result is registered with transformers under a name with `flash`: only
for such names does transformers take its packed branch, which has no host synchronisation.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from vitwire_server.core.budgets import Ladder, with_longer, with_shorter
from vitwire_server.runtime.attention.backends import BACKENDS, segment_sdpa
from vitwire_server.runtime.graphs import CudaRecorder
from vitwire_server.runtime.kernels.operands import Attend, Segments, Tiled

_log = logging.getLogger(__name__)
_BANDS = (
    (128, (*[64] * 81, *[0] * 319)),
    (256, (*[196] * 16, *[0] * 33)),
    (1024, (1024, 256, 64, 256, *[0] * 28)),
    (sys.maxsize, (4096, 1728, 1024, 836, 400, *[0] * 123)),
)
"""For each band, the largest `longest` in it, and sample segments to check and time backends on: windows, images of
224 x 224, small images, and images of several sizes, with as many slots as a budget for them has."""
_RESAMPLED, _QUERIES = (1024, 256, 40, 256, *[0] * 28), 64
"""Sample segments to check a resampler's heads on, and the queries of each."""
_REPEATS, _CALLS = 5, 8
_NEW_LINE = "\n"
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

    def tiles(self, segments: Segments, shape: tuple[int, ...]) -> Tensor | None:
        """What may be kept for all layers of a forward, for queries of this shape; None if it has no tiles."""
        return self.attend.tiles(segments, *shape) if isinstance(self.attend, Tiled) else None

    def attended(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Segments,
        scale: float,
        *,
        tiles: Tensor | None = None,
        contained: bool = False,
    ) -> Tensor:
        """As `Attend`; NaN and infinity stay in their segment. `contained` keys and values are so already."""
        if not self.isolates and not contained:
            from vitwire_server.runtime.kernels.rowwise import contain  # noqa: PLC0415 - triton comes with CUDA

            k, v = contain(k, v)
        if isinstance(self.attend, Tiled):
            return self.attend.attend(q, k, v, segments, scale, tiles)
        return self.attend(q, k, v, segments, scale)


@dataclass(frozen=True, slots=True)
class Selection:
    """The backend of each band, and the reason."""

    bands: tuple[LoadedBackend, ...]
    """For each of `_BANDS`."""
    reason: str
    unused: Mapping[str, str] = field(default_factory=dict)
    """Why backends for this kind of device are not used."""

    @classmethod
    def only(cls, backend: LoadedBackend, reason: str) -> "Selection":
        """The same backend for all lengths."""
        return cls((backend,) * len(_BANDS), reason)

    def shorter(self, longest: int) -> list[int]:
        """Lengths below `longest` up to which another backend is faster, if it differs from that of longer ones."""
        below = [(most, one.name) for one, (most, _) in zip(self.bands, _BANDS, strict=True) if most < longest]
        steps = pairwise([*below, (longest, self.at(longest).name)])
        return [most for (most, name), (_, longer) in steps if name != longer]

    def completed(self, ladder: Ladder, *, merge: int) -> Ladder:
        """The ladder with budgets for short segments that are attended faster, and for the longest on a GPU.

        Segments so long that ours would attend to them are left out: torch's dense attention is faster, eagerly.
        """
        if self.at(sys.maxsize).name not in ("triton", "sdpa"):
            ladder = with_longer(ladder, merge=merge)
        return with_shorter(ladder, self.shorter, merge=merge)

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

    def register(self) -> None:
        """Make it known to transformers as `implementation`."""
        AttentionInterface.register(self.implementation, _packed(self.attend))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        """As `Attend`; NaN and infinity stay in their segment."""
        return self.at(max(segments.longest, segments.most_keys)).attended(q, k, v, segments, scale)


def select(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    *,
    captured: bool,
    resampler: tuple[int, int] | None = None,
) -> Selection:
    """Load and register the backend called `name`, or with `auto` the fastest that pass the accuracy check.

    Backends must also support the heads of the `resampler`, their number and the size of one, if there is one.
    Raises ValueError for an unknown backend, or one that does not run or is inaccurate on this device and dtype.
    """
    sizes = (head_dim, resampler[1]) if resampler else (head_dim,)
    faults = {
        each.name: next(filter(None, (each.fault(device, dtype, size, captured=captured) for size in sizes)), "")
        for each in BACKENDS.values()
    }
    wanted = [backend for backend in BACKENDS.values() if name in ("auto", backend.name)]
    loaded = []
    for backend in wanted:
        if not faults[backend.name]:
            try:
                loaded.append(LoadedBackend(backend.name, backend.load()))
            except Exception as error:  # noqa: BLE001 - third-party packages may fail in any way when imported
                faults[backend.name] = f"it cannot be loaded: {str(error).partition(_NEW_LINE)[0]}"
    if not loaded:
        known = ", ".join(f"{backend.name} ({'/'.join(backend.devices)})" for backend in BACKENDS.values())
        why = "; ".join(f"{each.name}: {faults[each.name]}" for each in wanted) or "there is no such backend"
        raise ValueError(f"attention backend {name!r} does not run on {device} in {dtype} ({why}); available: {known}")
    if device.type == "cuda":
        if resampler:
            sample = _Sample.of(_RESAMPLED, device, dtype, *resampler).resampled()
            loaded = [one for one in loaded if sample.seconds(one, faults) is not None]
        selection = _fastest(loaded, device, dtype, heads, head_dim, faults)
    else:
        selection = Selection.only(loaded[0], "the only backend for this device")
    selection.register()
    _log.info("attention: %s, %s", selection.name, selection.reason)
    if selection.unused and name == "auto":
        _log.info("attention: not used: %s", "; ".join(f"{name}: {why}" for name, why in selection.unused.items()))
    return selection


def _fastest(
    loaded: list[LoadedBackend],
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    faults: dict[str, str],
) -> Selection:
    """The fastest backend of each band; the reason lists the times, and `faults` are added to.

    Where it also attends to longer segments, both share a graph, so it is timed with their tiles.
    """
    samples = [_Sample.of(segments, device, dtype, heads, head_dim) for _, segments in _BANDS]
    bands: list[dict[str, float]] = []
    for sample in samples:
        bands.append({one.name: each for one in loaded if (each := sample.seconds(one, faults)) is not None})
        loaded = [one for one in loaded if one.name in bands[-1]]
    if not loaded:
        raise ValueError(f"no attention backend passed the accuracy check on {device}; see the log for the errors")
    fastest: list[LoadedBackend] = []
    for index in reversed(range(len(bands))):
        if fastest:
            longer = samples[index].of_longest(samples[index + 1].segments.longest)
            if (shared := longer.seconds(fastest[0], faults)) is None:
                others = [one for one in loaded if one is not fastest[0]]
                return _fastest(others, device, dtype, heads, head_dim, faults)
            bands[index][fastest[0].name] = shared
        fastest.insert(0, min(loaded, key=lambda one: bands[index][one.name]))
    times = "; ".join(f"{max(of)} patches: {_times(band)}" for (_, of), band in zip(_BANDS, bands, strict=True))
    unused = {name: why for name, why in faults.items() if why and device.type in BACKENDS[name].devices}
    return Selection(tuple(fastest), f"at {times}", unused)


def _times(seconds: Mapping[str, float]) -> str:
    ascending = sorted(seconds.items(), key=lambda pair: pair[1])
    return ", ".join(f"{name} {1e6 * each:.0f} us" for name, each in ascending)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Random rows in segments, and the result of float32 attention on them."""

    rows: tuple[Tensor, Tensor, Tensor]
    segments: Segments
    expected: Tensor

    @classmethod
    def of(
        cls, lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype, heads: int, head_dim: int
    ) -> "_Sample":
        generator = torch.Generator().manual_seed(0)
        # q, k and v interleaved, as one linear layer returns them.
        rows = torch.randn(sum(lengths), 3, heads, head_dim, generator=generator).mul(0.5).to(device, dtype)
        boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
        return cls._exact(rows.unbind(1), Segments(boundaries, max(lengths)))

    @classmethod
    def _exact(cls, rows: tuple[Tensor, ...], segments: Segments) -> "_Sample":
        q, k, v = rows
        return cls((q, k, v), segments, segment_sdpa(q.float(), k.float(), v.float(), segments, q.shape[-1] ** -0.5))

    def of_longest(self, longest: int) -> "_Sample":
        """The same in a graph that may hold a longer segment."""
        return replace(self, segments=self.segments._replace(longest=longest))

    def resampled(self) -> "_Sample":
        """A few queries for each segment, rather than one for each key."""
        q, k, v = self.rows
        boundaries, longest, *_ = self.segments
        ends = functional.pad((boundaries.diff() > 0).cumsum(0, dtype=torch.int32) * _QUERIES, (1, 0))
        return self._exact((q[: int(ends[-1])], k, v), Segments(ends, _QUERIES, boundaries, longest))

    def seconds(self, one: LoadedBackend, faults: dict[str, str]) -> float | None:
        """Seconds per call; None, with a log line and an entry in `faults`, if the backend fails or is inaccurate.

        To find tiles is not counted, as fused layers share them.
        """
        q = self.rows[0]
        try:
            tiles = one.tiles(self.segments, q.shape)
            run = partial(one.attended, *self.rows, self.segments, q.shape[-1] ** -0.5, tiles=tiles)
            error = float((run().float() - self.expected).norm() / self.expected.norm())
            if error <= 4 * torch.finfo(q.dtype).eps:
                return _seconds(run, q.device, syncs=BACKENDS[one.name].syncs)
            faults[one.name] = f"its relative error is {error:.1e}"
        except Exception as failure:  # noqa: BLE001 - third-party kernels and compilers may fail in any way
            faults[one.name] = f"it failed: {str(failure).partition(_NEW_LINE)[0]}"
        _log.warning("attention: %s is not used: %s", one.name, faults[one.name])
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
        cu_seq_lens_k: Tensor,
        max_length_q: int,
        max_length_k: int,
        **_: object,  # arguments of other backends
    ) -> tuple[Tensor, None]:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        segments = Segments(cu_seq_lens_q, max_length_q)
        if cu_seq_lens_k is not cu_seq_lens_q:
            segments = Segments(cu_seq_lens_q, max_length_q, cu_seq_lens_k, max_length_k)
        return attend(q, k, v, segments, scaling).unsqueeze(0), None

    return attention
