"""How fast and how exact a product is on a device."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from vitwire_server.runtime.graph_recording import captured

_COLD_BYTES = 100_000_000
"""Weights that a timing goes through: more than the cache of any device of today."""
_CHECKED_ROWS = 256
_REPEATS = 3


def exact_product(rows: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool) -> Tensor:
    """The product of the first rows in float32."""
    sums = functional.linear(rows[:_CHECKED_ROWS].float(), weight.float(), None if bias is None else bias.float())
    return functional.gelu(sums, approximate="tanh") if gelu else sums


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Distance of the first rows of `got` from `exact`, in norm."""
    return float((got[: len(exact)].float() - exact).norm() / exact.norm())


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all trials: torch keeps a workspace of cuBLAS for each stream, 16 to 32 MiB, until the process ends."""
    return torch.cuda.Stream(device)


def cold_seconds(run: Callable[[Tensor], object], weights: Sequence[Tensor]) -> float:
    """Median seconds of `run` in a graph of calls on different weights, which the cache does not hold."""
    count = max(1, min(len(weights), -(-_COLD_BYTES // weights[0].nbytes)))
    run(weights[0])
    stream = _stream(weights[0].device)
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPEATS + 1)]
    torch.cuda.synchronize(weights[0].device)
    with torch.cuda.stream(stream):
        with captured(graph):
            for weight in weights[:count]:
                run(weight)
        for before, after in events:
            before.record()
            graph.replay()
            after.record()
    stream.synchronize()
    return float(median(before.elapsed_time(after) for before, after in events[1:])) / 1e3 / count
