"""The best settings of `local`: one setting at a time from vLLM's defaults, kept if it helps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.engine.serving import Settings

Row = dict[str, Any]
AXES: Mapping[str, Sequence[Settings]] = {
    "API servers": [Settings({"--api-server-count": str(count)}) for count in (2, 4, 8)],
    "renderer threads": [Settings({"--renderer-num-workers": "4", "--mm-processor-cache-gb": "0"})],
    "encoder graphs": [Settings({"--compilation-config": '{"cudagraph_mm_encoder": true}'})],
    "graphs of long prompts": [Settings({"--max-cudagraph-capture-size": "2048"})],
    "tokens of a batch": [Settings({"--max-num-batched-tokens": str(count)}) for count in (4096, 2048)],
    "threads of OpenMP": [Settings(environment={"OMP_NUM_THREADS": "4"})],
    "Rust front end": [Settings(environment={"VLLM_USE_RUST_FRONTEND": "1"})],
}
"""Values other than the default of each setting. Those of one setting are tried until one does not help."""
GAIN, WITHIN = 1.02, 0.95
"""Helps: more requests a second by this, or no fewer and a median TTFT of at most this much."""


def helps(row: Row, best: Row) -> bool:
    """Whether a probe is better; never if a request of it failed."""
    if row.get("errors", 1) or not (row.get("requests_per_s") and best.get("requests_per_s")):
        return False
    gain: float = row["requests_per_s"] / best["requests_per_s"]
    return gain >= GAIN or bool(gain >= 1 and row["ttft_p50_ms"] <= WITHIN * best["ttft_p50_ms"])


def swept(
    probe: Callable[[Settings], Row],
    done: Iterable[Row],
    note: Callable[[Row, Settings], None],
    has_time: Callable[[], bool],
) -> tuple[Settings, bool]:
    """The best settings so far, and whether all were tried.

    probe: figures of a short stream, with `error` if the engine does not start. done: rows of an earlier run of the
    same sweep. note: is called with each new row and the best settings.
    """
    earlier = {(row["axis"], row["tried"]): row for row in done}

    def tried(axis: str, settings: Settings) -> Row | None:
        if row := earlier.get((axis, str(settings))):
            return row
        if not has_time():
            return None
        row = {"axis": axis, "tried": str(settings), **probe(settings)}
        row["kept"] = best_row is None or helps(row, best_row)
        note(row, settings if row["kept"] else best)
        return row

    best, best_row = Settings(), None
    best_row = tried("defaults", best)
    if best_row is None:
        return best, False
    if best_row.get("error"):
        raise RuntimeError(f"vLLM does not start with its defaults: {best_row['error']}")
    for axis, changes in AXES.items():
        for change in changes:
            row = tried(axis, best.changed(change))
            if row is None:
                return best, False
            if not row["kept"]:
                break
            best, best_row = best.changed(change), row
    return best, True
