"""The towers side by side: the same pictures and weights, measured in turns, their rows compared with float32's."""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from bench.engine.limits import Clock
from bench.engine.loads import Size
from bench.engine.towers.sides import Row, Side, SideFailed
from bench.report import Report
from torch import Tensor

from servers import PYTHON

SIZES = "224x1,448x1,1024x1,224x16,448x8"
COLUMNS = {"vllm": ("vllm_eager", "vllm_graph", "vllm_exact"), "vitwire": ("vitwire",)}
"""By the process that has them. The same process as vitwire's has plain transformers in float32."""
REFERENCE = "float32"
THEIRS = [sys.executable, "-m", "bench.engine.towers.theirs"]
OURS = [PYTHON, "-m", "bench.engine.towers.ours"]
READY_SECONDS = 300
_ROUNDS = 12
"""Pictures of each size whose rows are checked for NaN; other sizes are encoded in between."""
_SECONDS = 2.0
"""Of each measurement."""
_ANSWER_SECONDS = 60


def measure(report: Report, options: argparse.Namespace, clock: Clock, server_environment: Sequence[str]) -> None:
    """Add rows by size and tower; `server_environment` is the prefix of commands that run what the server runs."""
    sizes = [(size.side, size.images) for size in options.sizes]
    device = "cpu" if options.tiny else "cuda:0"
    job = {"model": str(options.model), "device": device, "sizes": sizes}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="towers-")))
        sides = [
            stack.enter_context(Side("vllm", THEIRS, job, os.environ)),
            stack.enter_context(Side("vitwire", [*server_environment, *OURS], job, os.environ)),
        ]
        for side in sides:
            for name, value in side.answer(min(READY_SECONDS, max(1.0, clock.left))).items():
                report.note(name, value)
        Measuring(report, options, clock, {side.name: side for side in sides}, folder).run()


class Measuring:
    """Asks both sides."""

    def __init__(
        self, report: Report, options: argparse.Namespace, clock: Clock, sides: Mapping[str, Side], folder: Path
    ) -> None:
        self._report = report
        self._options = options
        self._clock = clock
        self._sides = sides
        self._folder = folder

    def run(self) -> None:
        sizes: Sequence[Size] = self._options.sizes
        broken: dict[tuple[Size, str], list[int]] = {}
        rows: dict[tuple[Size, str], Tensor] = {}
        for number in range(_ROUNDS):
            for size in sizes:
                for name, column in self._columns(reference=number == 0):
                    if answer := self._ask(name, column, size, number=number, save=self._saved(number)):
                        broken.setdefault((size, column), []).append(answer["not_finite"])
                        if number == 0:
                            rows[size, column] = torch.load(self._saved(number)).float()
        for size in sizes:
            for name, column in self._columns():
                if answer := self._ask(name, column, size, number=0, seconds=_SECONDS):
                    place = {"size": str(size), "tower": column, "rows": len(rows.get((size, column), ()))}
                    errors = self._errors(rows, size, column)
                    counted = _counted(broken.get((size, column), []))
                    self._report.add("towers", place | answer | errors | counted)

    def _columns(self, *, reference: bool = False) -> list[tuple[str, str]]:
        found = [(name, column) for name, columns in COLUMNS.items() for column in columns]
        return [*found, ("vitwire", REFERENCE)] if reference else found

    def _saved(self, number: int) -> str:
        """A file for the rows of the first pictures; the others are only checked."""
        return str(self._folder / "rows") if number == 0 else ""

    def _ask(self, name: str, column: str, size: Size, **command: Any) -> Row | None:
        """None if the time is over or the tower fails, as the report then says."""
        what = f"towers {size} {column}"
        if self._clock.left < self._options.reserve:
            self._report.skip(what, "no time")
            return None
        place = {"side": size.side, "images": size.images, "column": column}
        seconds = min(_ANSWER_SECONDS, self._clock.left)
        try:
            return self._sides[name].ask(place | command, seconds)
        except SideFailed as error:
            self._report.skip(what, str(error))
            return None

    def _errors(self, rows: Mapping[tuple[Size, str], Tensor], size: Size, column: str) -> Row:
        """Norm errors of the rows of the first pictures, in which only rows count that are finite in both."""
        return {
            f"error_to_{other}": _error(rows.get((size, column)), rows.get((size, other)))
            for other in (REFERENCE, "vllm_eager")
        }


def _error(rows: Tensor | None, expected: Tensor | None) -> float | None:
    if rows is None or expected is None or rows.shape != expected.shape:
        return None
    both = rows.isfinite().all(dim=1) & expected.isfinite().all(dim=1)
    if not both.any():
        return None
    return round(float((rows[both] - expected[both]).norm() / expected[both].norm()), 5)


def _counted(broken: Sequence[int]) -> Row:
    """How many pictures had rows that are not finite, and the most such rows."""
    return {"calls": len(broken), "calls_not_finite": sum(map(bool, broken)), "rows_not_finite": max(broken, default=0)}
