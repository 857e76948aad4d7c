"""vLLM's tower beside ours, on the same weights and pictures and in the same run."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from bench.commands import ClientEnded, ClientFailed, CommandProcess, Row
from bench.engine.loads import Size
from bench.engine.serving import ENVIRONMENT
from bench.engine.towers.vitwire_tower import VitwireTower
from bench.stopwatch import FAILURES
from bench.tower_times import norm_error
from torch import Tensor

MISSING = (
    "vLLM is not installed there: `pip install vllm==0.33.0` in a separate environment, and name its interpreter, "
    "--vllm vllm/bin/python, or for this interpreter a folder of packages"
)
VLLM_TOWER = ["-m", "bench.engine.towers.vllm_tower"]
SECONDS = 0.8
"""How long each measurement takes."""
_VLLM = ("vllm_eager", "vllm_graph", "vllm_exact")
"""Columns that vLLM's tower computes."""
_OURS, _REFERENCE = "vitwire", "float32"
"""Columns that ours computes, the latter by plain transformers."""
_FIND = "import sys, importlib.util; sys.exit(not importlib.util.find_spec('vllm'))"
_READY_SECONDS = 180
_ANSWER_SECONDS = 60
Skip = Callable[[str, str], None]
"""Lists what is left out, and why."""


def beside(
    ours: VitwireTower,
    loads: Mapping[str, Size],
    where: str,
    left: Callable[[], float],
    skip: Skip,
    note: Callable[[Row], None],
) -> Iterator[Row]:
    """A row for each load: milliseconds, how many times as long vLLM takes, and norm errors to float32.

    `where` is an interpreter that has vLLM, or a folder of packages; `left` are seconds. `note` gets vLLM's version,
    attention and budgets. Raises ClientFailed if vLLM's process does not load the tower, or ends.
    """
    python, environment = _environment(where)
    try:
        subprocess.run([python, "-c", _FIND], env=environment, check=True)
    except (OSError, subprocess.CalledProcessError):
        skip("vllm", MISSING)
        return
    names = {size: load for load, size in loads.items() if size.is_kept}
    for load in (load for load, size in loads.items() if size not in names):
        skip(f"{load} vllm", "its processor would resize them; it keeps sides of multiples of 32 from 128 on")
    if not names:
        return
    with CommandProcess(python, *VLLM_TOWER, environment=environment) as vllm:
        seconds = min(_READY_SECONDS, max(1.0, left()))
        note(vllm.ask(seconds, model=ours.checkpoint, sizes=[list(size) for size in names]))
        measuring = _Measuring(vllm, ours, skip, left)
        for size, load in names.items():
            yield {"load": load} | compared(measuring.rows(size))


def _environment(where: str) -> tuple[str, dict[str, str]]:
    """The interpreter that has vLLM, and its environment."""
    environment = {"VLLM_LOGGING_LEVEL": "WARNING"} | ENVIRONMENT | os.environ
    if not Path(where).is_dir():
        return where, environment
    return sys.executable, environment | {"PYTHONPATH": f"{where}:{environment.get('PYTHONPATH', '')}"}


class _Measuring:
    """Asks both towers in alternation."""

    def __init__(self, vllm: CommandProcess, ours: VitwireTower, skip: Skip, left: Callable[[], float]) -> None:
        self._vllm, self._ours, self._skip, self._left = vllm, ours, skip, left

    def rows(self, size: Size) -> dict[str, Row]:
        """Times of a size by column, and norm errors to float32; without columns that fail."""
        embeddings: dict[str, Tensor] = {}
        with tempfile.TemporaryDirectory(prefix="towers-") as folder:
            saved = Path(folder) / "embeddings"
            for column in (*_VLLM, _OURS, _REFERENCE):
                if self._ask(column, size, save=str(saved)) is not None:
                    embeddings[column] = torch.load(saved).float()
        rows: dict[str, Row] = {}
        for column in (*_VLLM, _OURS):
            if answer := self._ask(column, size, seconds=SECONDS):
                rows[column] = answer | {"error": _error(embeddings.get(column), embeddings.get(_REFERENCE))}
        return rows

    def _ask(self, column: str, size: Size, **command: Any) -> Row | None:
        """None if the time is over or the tower fails."""
        what, name = f"{size} {column}", "vllm" if column in _VLLM else "vitwire"
        if self._left() < 0:
            self._skip(what, "no time")
            return None
        try:
            command |= {"size": list(size), "column": column}
            if column in _VLLM:
                return self._vllm.ask(min(_ANSWER_SECONDS, self._left()), **command)
            return self._ours.answer(command)
        except ClientEnded:
            raise
        except (ClientFailed, *FAILURES) as error:
            self._skip(what, f"{name}: {error}".partition("\n")[0])
            return None


def _error(embeddings: Tensor | None, expected: Tensor | None) -> float | None:
    """Norm error of the rows; None if either has none, or some are not finite."""
    if embeddings is None or expected is None:
        return None
    error = norm_error(embeddings, expected)
    return round(error, 5) if isfinite(error) else None


def compared(rows: Mapping[str, Row]) -> Row:
    """The figures of a load, from a row of each column; null if one failed."""
    times = {column: row["device_ms"] for column, row in rows.items()}
    ratios = {column: round(time / times["vitwire"], 2) for column, time in times.items() if "vitwire" in times}
    vllm, vitwire = rows.get("vllm_graph", {}), rows.get("vitwire", {})
    return {
        "ours": times.get("vitwire"),
        **{column: times.get(column) for column in _VLLM},
        "vllm_over_ours": ratios.get("vllm_graph"),
        "exact_over_ours": ratios.get("vllm_exact"),
        "call_ours": vitwire.get("call_ms"),
        "call_vllm": vllm.get("call_ms"),
        "error": vitwire.get("error"),
        "error_vllm": vllm.get("error"),
    }
