"""Seconds of a call, and repeats of a measurement. Needs torch alone: it also runs in an engine's environment."""

import time
from collections.abc import Callable
from math import inf
from typing import TypeVar

import torch

Taken = TypeVar("Taken")


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Seconds between events around a call, with nothing else running in this process; on the CPU, until it returns."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    started, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    run()
    done.record()
    done.synchronize()
    return float(started.elapsed_time(done)) / 1e3


def repeated(once: Callable[[], Taken], seconds: float, *, warm_ups: int, least: int, most: float = inf) -> list[Taken]:
    """Results of `once` until `seconds` are over or there are `most`, but at least `least`, after `warm_ups`."""
    for _ in range(warm_ups):
        once()
    taken: list[Taken] = []
    end = time.monotonic() + seconds
    while len(taken) < least or (len(taken) < most and time.monotonic() < end):
        taken.append(once())
    return taken
