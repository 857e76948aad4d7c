"""Which backend attends within packed segments: one for each band of lengths, registered as one.

`auto` checks each backend that can run on the device against float32 attention, times those that are right on the
model's own heads, and takes the fastest of each band. transformers takes the packed branch, which has no host
synchronisation, only for names that contain `flash`.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from vitwire_server.runtime.attention.backends import BACKENDS, Attend, Backend, segment_sdpa
from vitwire_server.runtime.graphs import CudaRecorder

_log = logging.getLogger(__name__)
_BANDS = (
    (128, (*[64] * 81, *[0] * 319)),
    (1024, (1024, 256, 64, 256, *[0] * 28)),
    (sys.maxsize, (4096, 1728, 1024, 836, 400, *[0] * 123)),
)
"""Up to how many patches the longest segment has room for, and segments to check and time backends on: windows, small
images, and images of several sizes, with as many slots as a budget for them has."""
_REPEATS = 5
_CALLS = 8
_FAILED: list[CudaRecorder] = []
"""Kept for the graphs that CUDA invalidated, which torch's allocator may ask after."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A backend that is there."""

    name: str
    attend: Attend

    @property
    def isolates(self) -> bool:
        """Whether values that are not finite stay in their segment."""
        return BACKENDS[self.name].isolates


@dataclass(frozen=True, slots=True)
class Choice:
    """What attends, and why."""

    bands: tuple[Loaded, ...]
    """For each of `_BANDS`."""
    reason: str

    @classmethod
    def only(cls, backend: Loaded, reason: str) -> "Choice":
        """One for all lengths."""
        return cls((backend,) * len(_BANDS), reason)

    @property
    def name(self) -> str:
        """The backends, each once, from short segments to long ones."""
        return "+".join(dict.fromkeys(one.name for one in self.bands))

    @property
    def implementation(self) -> str:
        """The name that transformers knows it by."""
        return f"vitwire_flash_{self.name}"

    @property
    def lengths(self) -> list[int]:
        """A length for each backend, at which it is what attends."""
        return list({one.name: max(segments) for one, (_, segments) in zip(self.bands, _BANDS, strict=True)}.values())

    def at(self, longest: int) -> Loaded:
        """What attends where the longest segment has room for so many patches."""
        return next(one for one, (most, _) in zip(self.bands, _BANDS, strict=True) if longest <= most)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
        """As `Attend` says; what is not finite stays in its segment."""
        one = self.at(longest)
        if not one.isolates:
            from vitwire_server.runtime.kernels.containment import contain  # noqa: PLC0415 - triton comes with CUDA

            k, v = contain(k, v)
        return one.attend(q, k, v, boundaries, longest, scale)


def choose(name: str, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, *, captured: bool) -> Choice:
    """Load and register the backend called `name`, or with `auto` the fastest that are right.

    Raises ValueError if there is no such backend, if it does not run on this device and dtype, or is wrong there.
    """
    fitting = [backend for backend in BACKENDS.values() if backend.runs(device, dtype, head_dim, captured=captured)]
    if name != "auto":
        fitting = [backend for backend in fitting if backend.name == name]
    loaded = [one for backend in fitting if (one := _loaded(backend, quiet=name == "auto"))]
    if not loaded:
        known = ", ".join(f"{backend.name} ({'/'.join(backend.devices)})" for backend in BACKENDS.values())
        raise ValueError(f"attention backend {name!r} does not run on {device} in {dtype}; available: {known}")
    if device.type == "cuda":
        choice = _fastest(loaded, device, dtype, heads, head_dim)
    else:
        choice = Choice.only(loaded[0], "the only backend for this device")
    AttentionInterface.register(choice.implementation, _packed(choice.attend))
    _log.info("attention: %s, %s", choice.name, choice.reason)
    return choice


def _loaded(backend: Backend, *, quiet: bool) -> Loaded | None:
    try:
        return Loaded(backend.name, backend.load())
    except Exception as error:  # noqa: BLE001 - packages of others may fail in any way while they are imported
        _log.log(logging.DEBUG if quiet else logging.ERROR, "attention: cannot load %s: %s", backend.name, error)
        return None


def _fastest(loaded: list[Loaded], device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> Choice:
    """The fastest backend of each band, and the times as the reason."""
    bands: list[dict[str, float]] = []
    for _, segments in _BANDS:
        sample = _Sample.of(segments, device, dtype, heads, head_dim)
        bands.append({one.name: each for one in loaded if (each := sample.seconds(one)) is not None})
        loaded = [one for one in loaded if one.name in bands[-1]]
    if not loaded:
        raise ValueError(f"no attention backend passed the accuracy check on {device}; see the log for the errors")
    told = "; ".join(f"{max(of)} patches: {_told(band)}" for (_, of), band in zip(_BANDS, bands, strict=True))
    fastest = tuple(min(loaded, key=lambda one: band[one.name]) for band in bands)
    return Choice(fastest, f"at {told}")


def _told(seconds: Mapping[str, float]) -> str:
    ascending = sorted(seconds.items(), key=lambda pair: pair[1])
    return ", ".join(f"{name} {1e6 * each:.0f} us" for name, each in ascending)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Random rows in segments, and what float32 attention makes of them."""

    rows: tuple[Tensor, Tensor, Tensor]
    boundaries: Tensor
    longest: int
    expected: Tensor

    @classmethod
    def of(
        cls, segments: tuple[int, ...], device: torch.device, dtype: torch.dtype, heads: int, head_dim: int
    ) -> "_Sample":
        generator = torch.Generator().manual_seed(0)
        # As one linear layer for all three leaves them.
        rows = torch.randn(sum(segments), 3, heads, head_dim, generator=generator).mul(0.5).to(device, dtype)
        boundaries = torch.tensor([0, *torch.tensor(segments).cumsum(0).tolist()], dtype=torch.int32, device=device)
        q, k, v = rows.unbind(1)
        exact = segment_sdpa(q.float(), k.float(), v.float(), boundaries, max(segments), head_dim**-0.5)
        return cls((q, k, v), boundaries, max(segments), exact)

    def seconds(self, one: Loaded) -> float | None:
        """What one call takes; None if the backend fails or is wrong, which is logged."""
        q = self.rows[0]
        run = partial(Choice.only(one, "").attend, *self.rows, self.boundaries, self.longest, q.shape[-1] ** -0.5)
        try:
            error = float((run().float() - self.expected).norm() / self.expected.norm())
            if error <= 4 * torch.finfo(q.dtype).eps:
                return _seconds(run, q.device, syncs=BACKENDS[one.name].syncs)
            _log.warning("attention: %s is not used: relative error %.1e", one.name, error)
        except Exception as failure:  # noqa: BLE001 - others' kernels, and their compilers, may fail in any way
            _log.warning("attention: %s failed: %s", one.name, str(failure).partition("\n")[0])
        return None


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
