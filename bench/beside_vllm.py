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
    "vLLM is not installed there: `pip install vllm==0.33.0` in an environment of its own, and name its interpreter, "
    "--vllm vllm/bin/python, or for this interpreter a folder of packages"
)
_SIDE = 32
"""Pictures with sides of multiples of this are resized by no processor."""
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
) -> Iterator[Row]:
    """A row for each load: milliseconds, how many times as long vLLM takes, and norm errors to float32.

    `where` is an interpreter that has vLLM, or a folder of packages. Raises SideEnded.
    """
    python, environment = _environment(where)
    try:
        subprocess.run([python, "-c", "import vllm.version"], env=environment, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        skip("vllm", MISSING)
        return
    names = {size: load for load, size in loads.items() if size.side % _SIDE == 0}
    for load in loads.keys() - names.values():
        skip(f"{load} vllm", f"its processor would resize it: take multiples of {_SIDE}")
    job = job_of(Path(loaded.checkpoint), str(loaded.tower.device), list(names))
    with Side("vllm", [python, *measuring.THEIRS], job, environment) as theirs:
        sys.stderr.write(f"vLLM: {theirs.answer(min(_READY_SECONDS, max(1.0, left())))}\n")
        asked = Measuring({"vllm": theirs, "vitwire": Here(OurTower(loaded))}, skip, left, reserve=0)
        rows = asked.rows(list(names), rounds=1, seconds=_SECONDS)
        for size, own in groupby(rows, key=lambda row: row["size"]):
            yield {"load": names[size]} | _compared({row["tower"]: row for row in own})


def _environment(where: str) -> tuple[str, dict[str, str]]:
    """The interpreter that has vLLM, and its environment."""
    environment = vllm_engine.ENVIRONMENT | os.environ
    if not Path(where).is_dir():
        return where, environment
    return sys.executable, environment | {"PYTHONPATH": f"{where}:{environment.get('PYTHONPATH', '')}"}


def _compared(rows: Mapping[str, Row]) -> Row:
    """By tower; vLLM's default is its graph, or its eager forward if it has none of this size."""
    times = {name: row["device_ms"] for name, row in rows.items()}
    ours = times.get("vitwire")
    default = "vllm_graph" if "vllm_graph" in times else "vllm_eager"
    ratios = {name: round(time / ours, 2) for name, time in times.items()} if ours else {}
    return {
        "ours": ours,
        **{name: times.get(name) for name in measuring.COLUMNS["vllm"]},
        "vllm_over_ours": ratios.get(default),
        "exact_over_ours": ratios.get("vllm_exact"),
        "aim": _verdict(ratios.get(default), ratios.get("vllm_exact")),
        "call_ours": rows.get("vitwire", {}).get("call_ms"),
        "call_vllm": rows.get(default, {}).get("call_ms"),
        "error": rows.get("vitwire", {}).get(f"error_to_{REFERENCE}"),
        "error_vllm": rows.get(default, {}).get(f"error_to_{REFERENCE}"),
    }


def _verdict(default: float | None, exact: float | None) -> str | None:
    """Of vLLM's default, and of a graph of exactly this size if that differs."""
    if default is None:
        return None
    if default < AIM:
        return "missed"
    return "reached" if exact is None or exact >= AIM else "reached, but not for exact graphs"
