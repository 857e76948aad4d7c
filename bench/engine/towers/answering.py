"""What a tower is asked for, in this process or in another one: its rows, and times by the device's clock."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np
import torch
from bench.commands import Row, answer_commands
from bench.engine.loads import Size
from bench.timing import repeated, seconds_of
from PIL import Image
from torch import Tensor

_WARM_UPS = 3
_LEAST = 5
"""Repeats of a measurement, whatever they take."""


class Tower(ABC):
    """One or several ways to run a tower, which `column` names."""

    device: torch.device
    described: Row
    """What was loaded, for who asks another process."""

    @abstractmethod
    def encode(self, column: str, pictures: Sequence[Any]) -> Tensor:
        """The rows of all pictures in order."""

    @abstractmethod
    def replayed(self, column: str, pictures: Sequence[Any]) -> Callable[[], object]:
        """The forward alone, its inputs being on the device already."""

    @abstractmethod
    def call(self, column: str, pictures: Sequence[Any]) -> Callable[[], object]:
        """The whole call, from patches on the host; it may return before the device is done."""

    def answer(self, command: Row) -> Row:
        """Do what a command says: save rows, or measure for some seconds."""
        column, pictures = command["column"], pictures_of(Size(*command["size"]))
        if "save" in command:
            torch.save(self.encode(column, pictures).cpu(), command["save"])
            return {}
        self.encode(column, pictures)
        forward = self.replayed(column, pictures)
        on_device = self._repeated(lambda: seconds_of(forward, self.device), command)
        call = self.call(column, pictures)
        whole = self._repeated(lambda: self._until_done(call), command)
        medians = {"device_ms": on_device, "call_ms": whole}
        return {name: round(1e3 * median(each), 3) for name, each in medians.items()}

    def _repeated(self, once: Callable[[], float], command: Row) -> list[float]:
        return repeated(once, command["seconds"] / 2, warm_ups=_WARM_UPS, least=_LEAST)

    def _until_done(self, run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


def answering(load: Callable[[Row], Tower]) -> None:
    """Answer the first command by what was loaded for it, and then what the tower is asked for."""
    loaded: list[Tower] = []

    def answered(command: Row) -> Row:
        if loaded:
            return loaded[0].answer(command)
        loaded.append(load(command))
        return loaded[0].described

    answer_commands(answered)


@lru_cache(maxsize=1)
def pictures_of(size: Size) -> list[Any]:
    """The pictures of a forward: Pillow's, or one clip `(frames, H, W, 3)`."""
    frames = [_picture(size.side, index) for index in range(size.images * size.frames)]
    return frames if size.frames == 1 else [np.stack([np.asarray(each) for each in frames])]


def _picture(side: int, index: int) -> Any:
    """Low and high frequencies."""
    rng = np.random.default_rng((0, side, index))
    coarse = rng.integers(0, 256, (max(1, side // 16), max(1, side // 16), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC), np.int16)
    noise = rng.integers(-24, 25, (side, side, 3), np.int16)
    return Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))
