"""A process with a tower: reads commands, answers each with a line, and measures by the device's clock."""

import json
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from bench.engine.loads import Size
from bench.engine.requests import pictures_of
from bench.timing import repeated, seconds_of
from torch import Tensor

Row = dict[str, Any]
_WARM_UPS = 3
_LEAST = 5
"""Repeats of a measurement, whatever they take."""


class Tower(ABC):
    """One or several ways to run a tower, which `column` names."""

    device: torch.device

    def described(self) -> Row:
        """What was loaded."""
        return {}

    @abstractmethod
    def encode(self, column: str, pictures: Sequence[Any]) -> Tensor:
        """The rows of all pictures in order."""

    @abstractmethod
    def replayed(self, column: str, pictures: Sequence[Any]) -> tuple[Callable[[], object], Sequence[int]]:
        """The forward alone, its inputs being on the device already, and the tokens of the graphs that it replays."""

    @abstractmethod
    def call(self, column: str, pictures: Sequence[Any]) -> Callable[[], object]:
        """The whole call, from patches on the host; it may return before the device is done."""

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def answer(self, command: Row) -> Row:
        """Do what a command says: save rows, or measure for some seconds."""
        column, pictures = command["column"], pictures_of(Size(*command["size"]))
        if "save" in command:
            torch.save(self.encode(column, pictures).cpu(), command["save"])
            return {}
        self.encode(column, pictures)
        forward, budgets = self.replayed(column, pictures)
        on_device = self._repeated(lambda: seconds_of(forward, self.device), command)
        call = self.call(column, pictures)
        whole = self._repeated(lambda: self._until_done(call), command)
        medians = {"device_ms": on_device, "call_ms": whole}
        return {"budgets": list(budgets)} | {name: round(1e3 * median(each), 3) for name, each in medians.items()}

    def answered(self, command: Row) -> Row:
        """The answer to a command, or the reason for its failure."""
        try:
            return self.answer(command)
        except Exception as error:  # noqa: BLE001 - other sizes may work
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}

    def _repeated(self, once: Callable[[], float], command: Row) -> list[float]:
        return repeated(once, command["seconds"] / 2, warm_ups=_WARM_UPS, least=_LEAST)

    def _until_done(self, run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - start


def answering(load: Callable[[Row], Tower]) -> None:
    """Load the tower of the job in the last argument, and answer commands until their end."""
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    tower = load(json.loads(sys.argv[-1]))
    print(json.dumps(tower.described()), file=lines)
    for line in sys.stdin:
        print(json.dumps(tower.answered(json.loads(line))), file=lines)
