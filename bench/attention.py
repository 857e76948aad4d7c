"""`python bench/attention.py`: every installed attention backend on packed segments, and its error to float32.

On a GPU a graph of calls on other queries, keys and values each is replayed, so that the cache is cold. A backend with
tiles gets them: layers of a forward share them. The last line of stdout is one JSON document.
"""

import argparse
import sys
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch
from bench.report import Report
from bench.timing import seconds_of
from torch import Tensor

from vitwire_server.runtime.attention.backends import BACKENDS, segment_sdpa
from vitwire_server.runtime.attention.selection import LoadedBackend
from vitwire_server.runtime.graphs import CudaRecorder, SimulatedRecorder
from vitwire_server.runtime.kernels.operands import Segments

CASES = (
    ((196,), 9),
    ((196,) * 16, 16),
    ((784,), 13),
    ((1600,), 8),
    ((1024, 256, 64, 256), 32),
    ((784,) * 8, 24),
    ((4096,), 17),
    ((4096, 1728, 1024, 836, 400), 5),
    ((4096, 1728, 1024, 836, 400), 128),
    ((16384,), 65),
)
"""Segments of patches, and the slots of their graph."""
_MOST_ROWS = 1 << 17
"""Of all calls of a graph."""


def main(arguments: list[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda:0", type=torch.device)
    add("--tiny", action="store_true", help="segments of a sixteenth: shows that it runs")
    add("--heads", default=16, type=int)
    add("--columns", default=72, type=int, help="of a head")
    add("--backends", nargs="+", default=[*BACKENDS], choices=[*BACKENDS])
    add("--calls", default=27, type=int, help="of a graph, at most")
    add("--repeats", default=12, type=int)
    add("--out", type=Path)
    options = parser.parse_args(arguments)
    on, dtype = options.device, torch.bfloat16
    cuda = on.type == "cuda"
    report = Report(
        "attention", options.out, {"heads": options.heads, "columns": options.columns, "tiny": options.tiny}
    )
    report.note("device", torch.cuda.get_device_name(on) if cuda else "cpu")
    for backend in (BACKENDS[name] for name in options.backends):
        if fault := backend.fault(on, dtype, options.columns, captured=cuda):
            report.skip(backend.name, fault)
            continue
        try:
            one = LoadedBackend(backend.name, backend.load())
            for lengths, slots in CASES:
                shorter = tuple(-(-length // 16) for length in lengths) if options.tiny else lengths
                microseconds, error = measured(one, shorter, slots, options)
                name = f"{len(lengths)} of {lengths[0]}" if len(set(lengths)) == 1 else ", ".join(map(str, lengths))
                row = {"backend": one.name, "segments": name, "slots": slots}
                report.add("attention", row | {"us": round(microseconds, 1), "error": round(error, 5)})
        except Exception as failure:  # noqa: BLE001 - third-party kernels and compilers may fail in any way
            report.skip(backend.name, repr(failure)[:200])
    report.end({"attention": "Attention of packed segments"})


def measured(
    one: LoadedBackend, lengths: tuple[int, ...], slots: int, options: argparse.Namespace
) -> tuple[float, float]:
    """Microseconds of a call, and its norm error on two heads."""
    on = options.device
    ends = [*accumulate(lengths, initial=0)]
    ends += ends[-1:] * (slots - len(lengths))
    segments = Segments(torch.tensor(ends, dtype=torch.int32, device=on), max(lengths))
    generator = torch.Generator(on).manual_seed(0)
    shape = (sum(lengths), 3, options.heads, options.columns)
    count = max(2, min(options.calls, _MOST_ROWS // shape[0]))
    samples = [torch.randn(shape, generator=generator, device=on, dtype=torch.bfloat16) for _ in range(count)]
    scale = options.columns**-0.5
    tiles = one.tiles(segments, samples[0][:, 0].shape)
    attended = partial(one.attended, segments=segments, scale=scale, tiles=tiles)
    run = partial(_all, attended, samples)
    stream = torch.cuda.Stream(on) if on.type == "cuda" else None
    with torch.inference_mode():
        got = attended(*samples[0].unbind(1))[:, :2].float()
        q, k, v = samples[0][:, :, :2].float().unbind(1)
        expected = segment_sdpa(q, k, v, segments, scale)
        replay = (CudaRecorder(stream) if stream else SimulatedRecorder()).record(run)
        with torch.cuda.stream(stream):
            taken = [seconds_of(replay, on) for _ in range(options.repeats + 1)]
    error = float((got - expected).norm() / expected.norm())
    return median(taken[1:]) / count * 1e6, error


def _all(attended: partial[Tensor], samples: list[Tensor]) -> None:
    for each in samples:
        attended(*each.unbind(1))


if __name__ == "__main__":
    main(sys.argv[1:])
