"""vLLM's tower beside ours, on the same weights and pictures and in the same run."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from bench.engine import vllm_engine
from bench.engine.loads import Size
from bench.engine.towers import measuring
from bench.engine.towers.measuring import REFERENCE, Measuring, job_of
from bench.engine.towers.ours import Loaded, OurTower
from bench.engine.towers.sides import Row, Side, checked

AIM = 1.5
"""vLLM's time over ours."""
MISSING = (
    "vLLM is not installed there: `pip install vllm==0.33.0` in a separate environment, and name its interpreter, "
    "--vllm vllm/bin/python, or for this interpreter a folder of packages"
)
_FIND = "import sys, importlib.util; sys.exit(not importlib.util.find_spec('vllm'))"
_SECONDS = 0.8
_READY_SECONDS = 180


class Here:
    """Our tower in this process, asked as one of another process is."""

    def __init__(self, tower: OurTower) -> None:
        self._tower = tower

    def ask(self, command: Row, seconds: float) -> Row:  # noqa: ARG002  # it always answers
        """The answer to a command. Raises SideFailed."""
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
    and why; `note` gets vLLM's version, attention and budgets. Raises SideEnded.
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
    job = job_of(Path(loaded.checkpoint), str(loaded.tower.device), list(names))
    with Side("vllm", [python, *measuring.THEIRS], job, environment) as theirs:
        note(theirs.answer(min(_READY_SECONDS, max(1.0, left()))))
        asked = Measuring({"vllm": theirs, "vitwire": Here(OurTower(loaded))}, skip, left, reserve=0)
        rows = asked.rows(list(names), rounds=1, seconds=_SECONDS)
        for size, own in groupby(rows, key=lambda row: row["size"]):
            yield {"load": names[size]} | compared({row["tower"]: row for row in own})


def _environment(where: str) -> tuple[str, dict[str, str]]:
    """The interpreter that has vLLM, and its environment."""
    environment = vllm_engine.ENVIRONMENT | os.environ
    if not Path(where).is_dir():
        return where, environment
    return sys.executable, environment | {"PYTHONPATH": f"{where}:{environment.get('PYTHONPATH', '')}"}


def compared(rows: Mapping[str, Row]) -> Row:
    """The figures of a load, from a row of each tower; null if one failed."""
    theirs, ours = rows.get("vllm_graph", {}), rows.get("vitwire", {})
    times = {name: row["device_ms"] for name, row in rows.items()}
    ratios = {name: round(time / times["vitwire"], 2) for name, time in times.items() if "vitwire" in times}
    default, exact = ratios.get("vllm_graph"), ratios.get("vllm_exact")
    return {
        "ours": times.get("vitwire"),
        **{name: times.get(name) for name in measuring.COLUMNS["vllm"]},
        "vllm_over_ours": default,
        "exact_over_ours": exact,
        "aim": None if default is None or exact is None else _verdict(default, exact),
        "call_ours": ours.get("call_ms"),
        "call_vllm": theirs.get("call_ms"),
        "error": ours.get(f"error_to_{REFERENCE}"),
        "error_vllm": theirs.get(f"error_to_{REFERENCE}"),
    }


def _verdict(default: float, exact: float) -> str:
    """Whether both of vLLM's graphs take long enough: ours are of exactly these sizes."""
    if default < AIM:
        return "missed"
    return "reached" if exact >= AIM else "default only"
