"""`vitwire-server budgets` on what servers of tile and crop towers record: budgets that those servers can capture."""

import json
from pathlib import Path

import pytest

from broken import load
from checkpoints import Checkpoints
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.fitting.command import main
from vitwire_server.fitting.traces import TraceError, TraceWriter, capacities_of, read_trace
from vitwire_server.towers.tower import Tower

LAYOUTS = [(1, 1), (2, 3), (1, 2), (3, 2), (2, 2), (1, 1), (4, 3), (1, 1), (2, 1)]
DEPTH = 3


def record(path: Path, sizes: list[tuple[Grid, Footprint]]) -> list[Footprint]:
    writer = TraceWriter(path)
    for grid, footprint in sizes:
        pixels = Pixels(b"", DType.UINT8, (footprint.patches, 0))
        writer.record([Item(Modality.IMAGE, grid, pixels, footprint, DType.UINT8)])
    writer.close()
    return read_trace(path, merge=2)


def recorded(tower: Tower, path: Path) -> list[Footprint]:
    """Images of several layouts, each with a tile more that shows all of it, on this tower."""
    grids = [Grid(rows * columns + (rows * columns > 1), rows, columns) for rows, columns in LAYOUTS * 5]
    return record(path, [(grid, tower.footprint(grid)) for grid in grids])


@pytest.mark.parametrize("model_type", ["internvl", "deepseek_vl_hybrid", "step3p7", "deepseek_ocr2"])
def test_fitted_budgets_are_those_that_the_tower_captures(
    model_type: str, checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tower = load(checkpoints(model_type)).tower
    trace, plans = tmp_path / "trace.jsonl", tmp_path / "plans.jsonl"
    items = recorded(tower, trace)
    most = 20 * max(item.tokens for item in items[:1]) + 7
    words = ["--trace", trace, "--max-budget-tokens", most, "--count", 6, "--queue-depth", DEPTH, "--plans", plans]
    assert main([*map(str, words)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    capacities, bounds = capacities_of(items), {"max_items": 64, "max_frames": 512}
    captured = {size: tower.budget(size, **bounds) for size in document["budgets"]}
    assert captured == {size: capacities.budget(size, **bounds) for size in document["budgets"]}
    assert [budget.tokens for budget in captured.values()] == document["budgets"]
    for batch in map(json.loads, plans.read_text().splitlines()):
        own = [items[DEPTH * batch["queue"] + position] for position in batch["items"]]
        if batch["budget"] is not None:
            capacity = tower.capacity(captured[batch["budget"]])
            assert sum(item.patches for item in own) <= capacity.patches
            assert sum(item.crops for item in own) <= capacity.crops


def test_eager_launches_are_listed_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    record(trace, [(grid, Footprint(4 * n, n, 1, 4 * n)) for n in (9, 16, 400) for grid in [Grid(1, 2, 2 * n)]])
    assert main(["--trace", str(trace), "--max-budget-tokens", "64"]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert document["eager"] == 1
    assert document["eager_launches"] == {"oversize": 1}
    assert "of which eager: oversize 1" in out


def test_a_trace_of_several_models_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    record(trace, [(Grid(1, 4, 4), Footprint(16, 4, 1, 16)), (Grid(3, 1, 2), Footprint(3, 768, 3, 1024))])
    assert main(["--trace", str(trace)]) == 1
    assert "several models" in capsys.readouterr().err


def test_crops_of_one_number_give_budgets_that_hold_them() -> None:
    item = Footprint(1, 169 + 6 * 81, 7, 2704, 6)
    capacities = capacities_of([item] * 3)
    tokens = capacities.needed(item)
    assert tokens == item.tokens
    assert capacities.budget(tokens, max_items=64, max_frames=512).fits(item, 1)


def test_tiles_of_different_sizes_are_of_several_models() -> None:
    with pytest.raises(TraceError, match="several models"):
        capacities_of([Footprint(2, 512, 2, 1024), Footprint(3, 300, 3, 1024)])
