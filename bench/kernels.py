"""The device's time of one replay of a graph, kernel by kernel."""

import re
from collections.abc import Callable
from typing import Any

import torch
from bench.stopwatch import Row
from torch.profiler import ProfilerActivity, profile

_ATTENTION = re.compile(r"attn|attend|attention|flash|fmha|sdpa|^_map$", re.IGNORECASE)
_PRODUCTS = re.compile(r"gemm|nvjet|cutlass|cublas|xmma|split_?k|::\w*mm$|::convolution", re.IGNORECASE)
_LONGEST = 90
"""Characters of a kernel's name that are kept."""


def kernel_times(replay: Callable[[], object], device: torch.device) -> list[Row]:
    """A row for each kernel, longest first: its group, calls, microseconds, and share of the sum of all kernels.

    On the CPU these are torch's operators. Kernels that overlap count twice, so their sum may exceed the replay's time.
    """
    cuda = device.type == "cuda"
    replay()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
        replay()
        if cuda:
            torch.cuda.synchronize(device)
    events: list[Any] = list(profiled.key_averages())
    times = {each.key: each.self_device_time_total if cuda else each.self_cpu_time_total for each in events}
    every = sum(times.values())
    rows = [
        {
            "group": group_of(each.key),
            "kernel": each.key[:_LONGEST],
            "calls": each.count,
            "us": round(times[each.key], 1),
            "share": round(times[each.key] / every, 3),
        }
        for each in events
        if times[each.key] > 0
    ]
    return sorted(rows, key=lambda row: -row["us"])


def group_of(kernel: str) -> str:
    """What a kernel computes, by its name."""
    if _ATTENTION.search(kernel):
        return "attention"
    return "products" if _PRODUCTS.search(kernel) else "norms and rest"


def by_group(rows: list[Row]) -> list[Row]:
    """The sums of each group."""
    groups = dict.fromkeys(row["group"] for row in rows)
    own = {group: [row for row in rows if row["group"] == group] for group in groups}
    return [
        {"group": group, "kernel": "all", "calls": sum(row["calls"] for row in each)}
        | {column: round(sum(row[column] for row in each), 3) for column in ("us", "share")}
        for group, each in own.items()
    ]
