"""Towers side by side: the same pictures and weights, measured in turns, their rows compared with float32's."""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from bench.engine.limits import Clock
from bench.engine.loads import Size
from bench.engine.towers.sides import Row, Side, SideFailed
from bench.report import Report
from torch import Tensor

from servers import PYTHON

SIZES = "224x1,448x1,1024x1,224x16,448x8"
COLUMNS = {"vllm": ("vllm_eager", "vllm_graph", "vllm_exact"), "vitwire": ("vitwire",)}
"""By the side that has them. Vitwire's also has plain transformers in float32."""
REFERENCE = "float32"
THEIRS = ["-m", "bench.engine.towers.theirs"]
OURS = [PYTHON, "-m", "bench.engine.towers.ours"]
READY_SECONDS = 300
_ROUNDS = 12
"""Pictures of each size whose rows are checked for NaN; other sizes are encoded in between."""
_SECONDS = 2.0
"""Of each measurement."""
_ANSWER_SECONDS = 60


class Asked(Protocol):
    """A tower in another process, or in this one."""

    def ask(self, command: Row, seconds: float) -> Row:
        """The answer to a command. Raises SideFailed."""


def measure(report: Report, options: argparse.Namespace, clock: Clock, server_environment: Sequence[str]) -> None:
    """Add rows by size and tower; `server_environment` is the prefix of commands that run what the server runs."""
    sizes: Sequence[Size] = options.sizes
    device = "cpu" if options.tiny else "cuda:0"
    job = job_of(options.model, device, sizes)
    with ExitStack() as stack:
        sides = [
            stack.enter_context(Side("vllm", [sys.executable, *THEIRS], job, os.environ)),
            stack.enter_context(Side("vitwire", [*server_environment, *OURS], job, os.environ)),
        ]
        for side in sides:
            for name, value in side.answer(min(READY_SECONDS, max(1.0, clock.left))).items():
                report.note(name, value)
        measuring = Measuring(
            {side.name: side for side in sides}, report.skip, lambda: clock.left, reserve=options.reserve
        )
        for row in measuring.rows(sizes, rounds=_ROUNDS, seconds=_SECONDS):
            report.add("towers", row | {"size": str(row["size"])})


def job_of(model: Path, device: str, sizes: Sequence[Size]) -> Row:
    """What a side is started with."""
    return {"model": str(model), "device": device, "sizes": [list(size) for size in sizes]}


class Measuring:
    """Asks both sides."""

    def __init__(
        self,
        sides: Mapping[str, Asked],
        skip: Callable[[str, str], None],
        left: Callable[[], float],
        *,
        reserve: float,
    ) -> None:
        """`skip` lists a measurement that is left out, and why; all are with less than `reserve` seconds `left`."""
        self._sides, self._skip, self._left, self._reserve = sides, skip, left, reserve

    def rows(self, sizes: Sequence[Size], *, rounds: int, seconds: float) -> Iterator[Row]:
        """A row for each size and tower: times, errors, and how many of `rounds` pictures had NaN in their rows."""
        broken: dict[tuple[Size, str], list[int]] = {}
        rows: dict[tuple[Size, str], Tensor] = {}
        with tempfile.TemporaryDirectory(prefix="towers-") as folder:
            saved = Path(folder) / "rows"
            for number in range(rounds):
                for size in sizes:
                    for name, column in self._columns(reference=number == 0):
                        save = "" if number else str(saved)
                        if answer := self._ask(name, column, size, number=number, save=save):
                            broken.setdefault((size, column), []).append(answer["not_finite"])
                            if save:
                                rows[size, column] = torch.load(saved).float()
        for size in sizes:
            for name, column in self._columns():
                if answer := self._ask(name, column, size, number=0, seconds=seconds):
                    place = {"size": size, "tower": column, "rows": len(rows.get((size, column), ()))}
                    yield place | answer | _errors(rows, size, column) | _counted(broken.get((size, column), []))

    def _columns(self, *, reference: bool = False) -> list[tuple[str, str]]:
        found = [(name, column) for name, columns in COLUMNS.items() for column in columns]
        return [*found, ("vitwire", REFERENCE)] if reference else found

    def _ask(self, name: str, column: str, size: Size, **command: Any) -> Row | None:
        """None if the time is over or the tower fails."""
        what = f"towers {size} {column}"
        if self._left() < self._reserve:
            self._skip(what, "no time")
            return None
        try:
            place = {"size": list(size), "column": column}
            return self._sides[name].ask(place | command, min(_ANSWER_SECONDS, self._left()))
        except SideFailed as error:
            self._skip(what, str(error))
            return None


def _errors(rows: Mapping[tuple[Size, str], Tensor], size: Size, column: str) -> Row:
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
