"""vLLM's tower beside ours, on the same weights and pictures and in the same run."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from bench.engine.loads import Size
from bench.engine.serving import ENVIRONMENT
from bench.engine.towers.tower_process import Row, TowerFailed, TowerProcess, checked
from bench.engine.towers.vitwire_tower import Loaded, VitwireTower
from torch import Tensor

AIM = 1.5
"""vLLM's time over ours."""
MISSING = (
    "vLLM is not installed there: `pip install vllm==0.33.0` in a separate environment, and name its interpreter, "
    "--vllm vllm/bin/python, or for this interpreter a folder of packages"
)
VLLM_TOWER = ["-m", "bench.engine.towers.vllm_tower"]
SECONDS = 0.8
"""How long each measurement takes."""
_COLUMNS = {"vllm_eager": "vllm", "vllm_graph": "vllm", "vllm_exact": "vllm", "vitwire": "vitwire"}
"""Which tower computes each column. Ours also computes `_REFERENCE`, by plain transformers."""
_REFERENCE = "float32"
_FIND = "import sys, importlib.util; sys.exit(not importlib.util.find_spec('vllm'))"
_READY_SECONDS = 180
_ANSWER_SECONDS = 60


class Asked(Protocol):
    """A tower in another process, or in this one."""

    def ask(self, command: Row, seconds: float) -> Row:
        """The answer to a command. Raises TowerFailed."""


class Here:
    """Our tower in this process, asked as one of another process is."""

    def __init__(self, tower: VitwireTower) -> None:
        self._tower = tower

    def ask(self, command: Row, seconds: float) -> Row:  # noqa: ARG002  # it always answers
        """The answer to a command. Raises TowerFailed."""
        return checked("vitwire", self._tower.answered(command))


def beside(
    loaded: Loaded,
    loads: Mapping[str, Size],
    where: str,
    left: Callable[[], float],
    skip: Callable[[str, str], None],
    note: Callable[[Row], None],
) -> Iterator[Row]:
    """A row for each load: milliseconds, how many times as long vLLM takes, and norm errors to float32.

    `where` is an interpreter that has vLLM, or a folder of packages; `left` are seconds. `skip` lists what is left out,
    and why; `note` gets vLLM's version, attention and budgets. Raises TowerEnded.
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
    job = {"model": loaded.checkpoint, "device": str(loaded.tower.device), "sizes": [list(size) for size in names]}
    with TowerProcess("vllm", [python, *VLLM_TOWER], job, environment) as vllm:
        note(vllm.answer(min(_READY_SECONDS, max(1.0, left()))))
        measuring = _Measuring({"vllm": vllm, "vitwire": Here(VitwireTower(loaded))}, skip, left)
        for size, load in names.items():
            yield {"load": load} | compared(measuring.rows(size))


def _environment(where: str) -> tuple[str, dict[str, str]]:
    """The interpreter that has vLLM, and its environment."""
    environment = ENVIRONMENT | os.environ
    if not Path(where).is_dir():
        return where, environment
    return sys.executable, environment | {"PYTHONPATH": f"{where}:{environment.get('PYTHONPATH', '')}"}


class _Measuring:
    """Asks both towers in alternation."""

    def __init__(
        self, towers: Mapping[str, Asked], skip: Callable[[str, str], None], left: Callable[[], float]
    ) -> None:
        self._towers, self._skip, self._left = towers, skip, left

    def rows(self, size: Size) -> dict[str, Row]:
        """Times of a size by column, and norm errors to float32; without columns that fail."""
        embeddings: dict[str, Tensor] = {}
        with tempfile.TemporaryDirectory(prefix="towers-") as folder:
            saved = Path(folder) / "embeddings"
            for column, name in {**_COLUMNS, _REFERENCE: "vitwire"}.items():
                if self._ask(name, column, size, save=str(saved)) is not None:
                    embeddings[column] = torch.load(saved).float()
        rows: dict[str, Row] = {}
        for column, name in _COLUMNS.items():
            if answer := self._ask(name, column, size, seconds=SECONDS):
                rows[column] = answer | {"error": _error(embeddings.get(column), embeddings.get(_REFERENCE))}
        return rows

    def _ask(self, name: str, column: str, size: Size, **command: Any) -> Row | None:
        """None if the time is over or the tower fails."""
        what = f"{size} {column}"
        if self._left() < 0:
            self._skip(what, "no time")
            return None
        try:
            place = {"size": list(size), "column": column}
            return self._towers[name].ask(place | command, min(_ANSWER_SECONDS, self._left()))
        except TowerFailed as error:
            self._skip(what, str(error))
            return None


def _error(embeddings: Tensor | None, expected: Tensor | None) -> float | None:
    """Norm error of the rows that are finite in both; None without any."""
    if embeddings is None or expected is None or embeddings.shape != expected.shape:
        return None
    both = embeddings.isfinite().all(dim=1) & expected.isfinite().all(dim=1)
    if not both.any():
        return None
    return round(float((embeddings[both] - expected[both]).norm() / expected[both].norm()), 5)


def compared(rows: Mapping[str, Row]) -> Row:
    """The figures of a load, from a row of each column; null if one failed."""
    vllm, vitwire = rows.get("vllm_graph", {}), rows.get("vitwire", {})
    times = {column: row["device_ms"] for column, row in rows.items()}
    ratios = {column: round(time / times["vitwire"], 2) for column, time in times.items() if "vitwire" in times}
    default, exact = ratios.get("vllm_graph"), ratios.get("vllm_exact")
    return {
        "ours": times.get("vitwire"),
        **{column: times.get(column) for column, tower in _COLUMNS.items() if tower == "vllm"},
        "vllm_over_ours": default,
        "exact_over_ours": exact,
        "aim": None if default is None or exact is None else _verdict(default, exact),
        "call_ours": vitwire.get("call_ms"),
        "call_vllm": vllm.get("call_ms"),
        "error": vitwire.get("error"),
        "error_vllm": vllm.get("error"),
    }


def _verdict(default: float, exact: float) -> str:
    """Whether both of vLLM's graphs take long enough: ours are of exactly these sizes."""
    if default < AIM:
        return "missed"
    return "reached" if exact >= AIM else "default only"
