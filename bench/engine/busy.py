"""Share of the time in which devices computed, whoever had them compute: NVML's utilisation, by nvidia-smi."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Self

_PERIOD_MS = 100
_QUERY = ("--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits", f"--loop-ms={_PERIOD_MS}")


class Busy:
    """Samples all devices in the background; none without nvidia-smi.

    A sample covers up to a second before it (NVML's period), so streams of a few seconds have soft edges.
    """

    def __init__(self) -> None:
        self._samples: list[tuple[float, int, float]] = []
        program = shutil.which("nvidia-smi")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        words = [program or "", *_QUERY, *([f"--id={visible}"] if visible else [])]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True) if program else None
        if self._process:
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()

    def between(self, begin: float, end: float, devices: Sequence[int]) -> dict[str, float]:
        """Means between two times of the monotonic clock, by device; without those that have no samples."""
        order = sorted({index for _, index, _ in list(self._samples)})
        found = {
            str(device): [share for at, index, share in list(self._samples) if begin <= at <= end and index == place]
            for device, place in zip(devices, (order[each] for each in devices if each < len(order)), strict=False)
        }
        return {device: round(fmean(shares), 2) for device, shares in found.items() if shares}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.kill()
            self._thread.join()
            self._process.wait()

    def _read(self) -> None:
        assert self._process
        assert self._process.stdout
        with self._process.stdout as lines:
            for line in lines:
                self.note(line, time.monotonic())

    def note(self, line: str, at: float) -> None:
        """A line of nvidia-smi. Lines without a sample, as from a device that reports none, are skipped."""
        index, _, percent = (each.strip() for each in line.partition(","))
        if index.isdecimal() and percent.isdecimal():
            self._samples.append((at, int(index), int(percent) / 100))
