"""`make gpu-bench` of towers of other makers: every one of them runs, and what is wrong is left out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import bench.gpu
import pytest
import torch
from bench.catalogue import OTHERS
from bench.gpu import Bench, options_of
from torch import Tensor

from benches import last_line

TINY = ("--device", "cpu", "--tiny", "--repeats", "3")
CLIP, DINO = "CLIP-L/14", "DINOv2-L/14"


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Changes fields of a tower of the catalogue."""

    def change(name: str, **fields: Any) -> None:
        monkeypatch.setattr(bench.gpu, "OTHERS", {**OTHERS, name: replace(OTHERS[name], **fields)})

    return change


def run(*names: str) -> dict[str, Any]:
    own = Bench(torch.device("cpu"), options_of([*TINY]))
    for name in names:
        own.run(name)
    return own.document()


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_all_of_them_run() -> None:
    document = last_line("bench/gpu.py", *TINY, "--towers", "others", "--seconds", "800")
    assert document["left_out"] == []
    assert [row["tower"] for row in document["rows"][::2]] == list(OTHERS)
    assert len(document["rows"]) == 2 * len(OTHERS)
    for row in document["rows"]:
        assert min(row["plain_sdpa"], row["eager"], row["graph"]) > 0, row
        assert row["norm_error"] < 0.05, row
    assert document["attention"].keys() == OTHERS.keys()


def test_a_tower_that_fails_does_not_end_the_run(changed: Callable[..., None]) -> None:
    changed(CLIP, transformers="99.0")
    document = run(CLIP, DINO)
    (reason,) = document["left_out"]
    assert reason.startswith(f"{CLIP}: needs transformers 99.0")
    assert [(row["tower"], row["load"], row["rows"]) for row in document["rows"]] == [
        (DINO, "1 x 224^2", 1),
        (DINO, "2 x 224^2", 2),
    ]
    assert all(row["floor"] is not None for row in document["rows"])


def test_times_of_wrong_rows_are_left_out(changed: Callable[..., None]) -> None:
    def plain(*arguments: Any) -> Callable[[], Tensor]:
        return lambda: 1.2 * OTHERS[CLIP].plain(*arguments)()

    changed(CLIP, plain=plain)
    document = run(CLIP)
    for row in document["rows"]:
        assert row["plain_sdpa"] > 0
        assert row["eager"] is row["graph"] is None
        assert row["norm_error"] == pytest.approx(1 / 6, abs=0.01)
    assert {f"{CLIP} 2 x 224^2 {column}" for column in ("eager", "graph")} <= {
        line.partition(":")[0] for line in document["left_out"]
    }
    assert all("rows differ from those of plain transformers by 0.17" in line for line in document["left_out"])


def test_the_error_of_rows_that_are_not_finite_is_unknown(changed: Callable[..., None]) -> None:
    def plain(*arguments: Any) -> Callable[[], Tensor]:
        return lambda: torch.nan * OTHERS[CLIP].plain(*arguments)()

    changed(CLIP, plain=plain)
    for row in run(CLIP)["rows"]:
        assert row["eager"] is row["graph"] is row["norm_error"] is None
