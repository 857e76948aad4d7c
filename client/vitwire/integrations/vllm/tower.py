"""Times the engine's tower in its workers, for the front end's forecast."""

import time
from collections import deque
from functools import cache

import torch
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner


class _Moment:
    """On a device, when it gets there."""

    def __init__(self, device: torch.device) -> None:
        self.time = time.monotonic()
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.event:
            self.event.record()

    def since(self, start: "_Moment") -> float | None:
        """Seconds between both; None before this one."""
        if self.event is None or start.event is None:
            return self.time - start.time
        return start.event.elapsed_time(self.event) / 1e3 if self.event.query() else None


_runs: deque[tuple[int, _Moment, _Moment]] = deque(maxlen=64)
"""Embeddings, start and end of runs that were not reported yet."""


@cache
def time_tower() -> None:
    """Patch vLLM's encoder runner, which has no hook. The run in which vLLM profiles memory is the first timed one."""
    encode, profile = EncoderRunner.execute_mm_encoder, EncoderRunner.profile_encoder_cache

    def timed(runner: EncoderRunner, items: list[object]) -> list[torch.Tensor]:
        began = _Moment(runner.device)
        outputs: list[torch.Tensor] = encode(runner, items)
        _runs.append((sum(map(len, outputs)), began, _Moment(runner.device)))
        return outputs

    def profiled(runner: EncoderRunner, inputs: list[object], *others: object) -> None:
        if inputs:
            encode(runner, inputs[:1])  # the first run compiles and loads kernels
        profile(runner, inputs, *others)

    EncoderRunner.execute_mm_encoder, EncoderRunner.profile_encoder_cache = timed, profiled


def take_times() -> dict[str, float]:
    """Seconds and embeddings of the runs that ended since the last call, in order; does not wait for the device."""
    taken = {"tower_seconds": 0.0, "tower_tokens": 0.0}
    while _runs:
        tokens, start, end = _runs[0]
        if (seconds := end.since(start)) is None:
            break
        taken["tower_seconds"] += seconds
        taken["tower_tokens"] += tokens
        _runs.popleft()
    return taken
