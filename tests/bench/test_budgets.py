"""`vitwire-server budgets`, from a recorded window to plans over another one, within the bounds it is built for."""

import json
from pathlib import Path

import pytest
from bench.sizes import trace

from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.fitting.command import main
from vitwire_server.fitting.traces import TraceWriter

PADDING = {1: 0.05, 4: 0.04, 16: 0.025, 64: 0.008}
"""Share of computed tokens, by queue depth; the ascending packing pads 30, 25, 18 and 11 % and more."""


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two windows of the shipped sizes, as `--record-trace` writes them."""
    folder = tmp_path_factory.mktemp("traces")
    paths = [folder / f"{seed}.jsonl" for seed in (1, 2)]
    for seed, path in enumerate(paths, 1):
        requests = ([{"modality": "image", "grid": grid} for grid in grids] for grids in trace(3000, seed))
        path.write_text("".join(json.dumps({"t": 0.0, "items": items}) + "\n" for items in requests))
    return paths


@pytest.mark.parametrize("depth", PADDING)
def test_one_ladder_serves_another_window_at_every_depth(
    depth: int, windows: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted, judged = windows
    ladder, plot, plans = (tmp_path / name for name in ("ladder.json", "ladder.png", "plans.jsonl"))
    words = ["--trace", fitted, "--judge", judged, "--queue-depth", depth, "--count", 24]
    assert main([*map(str, words), "--out", str(ladder), "--plot", str(plot), "--plans", str(plans)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    budgets = document["budgets"]
    assert len(budgets) <= 24
    assert budgets[-1] == 4096
    assert json.loads(ladder.read_text())["budgets"] == budgets
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert document["padding"] <= PADDING[depth]
    check_plans(plans, judged, depth, budgets, document)


def check_plans(plans: Path, judged: Path, depth: int, budgets: list[int], document: dict[str, object]) -> None:
    """The plans hold every item once, fit their budgets, and add up to the figures that were told."""
    lines = [json.loads(line) for line in judged.read_text().splitlines()]
    tokens = [t * h * w // 4 for line in lines for t, h, w in (item["grid"] for item in line["items"])]
    batches = [json.loads(line) for line in plans.read_text().splitlines()]
    computed, seen = 0, []
    for batch in batches:
        items = [batch["queue"] * depth + position for position in batch["items"]]
        load = sum(tokens[item] for item in items)
        assert len(items) <= 64
        assert batch["budget"] is None or load <= batch["budget"] in budgets
        computed += batch["budget"] or load
        seen += items
    assert sorted(seen) == list(range(len(tokens)))
    assert len(batches) == document["launches"]
    assert 1 - sum(tokens) / computed == pytest.approx(document["padding"], abs=1e-5)


@pytest.mark.parametrize("merge", [1, 3])
def test_towers_of_another_merge_fit_their_budgets(
    merge: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grids = [Grid(1, rows * merge, rows * merge) for rows in (4, 6, 10)]
    sizes = [(grid, Footprint(grid.patches, grid.patches // merge**2, 1, grid.patches)) for grid in grids]
    check_exact(sizes, tmp_path, capsys)


def test_items_of_crops_fit_their_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [(Grid(1 + crops, 1, 1), Footprint(1, 169 + 81 * crops, 1 + crops, 2704, crops)) for crops in (0, 2, 6)]
    check_exact(sizes, tmp_path, capsys)


def check_exact(sizes: list[tuple[Grid, Footprint]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recorded items of these sizes get budgets of their own, and no item is eager."""
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path)
    for grid, footprint in sizes:
        pixels = Pixels(b"", DType.UINT8, (footprint.patches, 0))
        writer.record([Item(Modality.IMAGE, grid, pixels, footprint, DType.UINT8)])
    writer.close()
    assert main(["--trace", str(path)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {footprint.tokens for _, footprint in sizes} <= set(document["budgets"])
    assert (document["padding"], document["launches"], document["eager"]) == (0.0, len(sizes), 0)


def test_what_cannot_be_read_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", "/nowhere.jsonl"]) == 1
    assert "/nowhere.jsonl cannot be read" in capsys.readouterr().err
