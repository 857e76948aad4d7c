"""Budgets of tiles and of crops: what they hold, and how the planner uses them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitwire_server.core.budgets import Ladder
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import total
from vitwire_server.core.plans import Fallback
from vitwire_server.runtime.graphs import InputBuffer
from vitwire_server.scheduling.planner import Bounds, Planner
from vitwire_server.towers.layouts.assembled import CropEncoder
from vitwire_server.towers.layouts.tiles import TileShape, TileTower, tile_steps

TILE, CROP = TileShape(8, 8, 16), TileShape(4, 4, 5)
CONFIG: Any = None


def numbered(tiles: Tensor, tokens: int) -> Tensor:
    """Every row of a tile is the tile's mean in all columns, and says which of its rows it is."""
    means = tiles.flatten(1).mean(dim=1)[:, None].expand(-1, tokens)
    return torch.stack([means, torch.arange(tokens).expand_as(means)], dim=-1)


class Plain(TileTower):
    """Tiles alone."""

    tile = TILE
    patch, merge, width, attention_heads, blocks = 2, 1, 2, (1, 2), ()

    def encode(self, tiles: Tensor) -> Tensor:
        return numbered(tiles, self.tile.tokens)


class Cropped(CropEncoder, Plain):
    """Overviews and crops."""

    crop = CROP

    def encode_crops(self, crops: Tensor) -> Tensor:
        return numbered(crops, self.crop.tokens)


@pytest.fixture
def tower() -> CropEncoder:
    return Cropped({"tower": nn.Linear(1, 1)}, CONFIG)


@pytest.mark.parametrize(("most", "steps"), [(0, []), (1, [1]), (5, [1, 2, 3, 4, 5]), (16, [1, 2, 3, 4, 6, 8, 12, 16])])
def test_steps_of_tiles(most: int, steps: list[int]) -> None:
    assert tile_steps(most) == steps


def test_budgets_of_tiles_are_whole_tiles() -> None:
    tower = Plain({"tower": nn.Linear(1, 1)}, CONFIG)
    assert tower.sizes(100) == [16, 32, 48, 64, 96]
    assert tower.sizes(15) == []
    for tokens, tiles in ((1, 1), (16, 1), (47, 2), (320, 20)):
        budget = tower.budget(tokens, max_items=8, max_frames=4)
        assert (budget.tokens, budget.max_segments, budget.max_items) == (16 * tiles, tiles, min(tiles, 8))
        grids = tower.samples(budget.tokens, 3)
        assert sum(grid.t for grid in grids) == tiles
        assert len(grids) <= 3
        assert budget.fits(total([tower.footprint(grid) for grid in grids]), len(grids))


def test_two_views_fit_a_budget_only_if_both_do(tower: CropEncoder) -> None:
    assert tower.footprint(Grid(4, 1, 3)) == Footprint(1, 31, 4, 16, crops=3)
    assert tower.sizes(42) == [16, 21, 26, 31, 32, 36, 42]
    one, two = (tower.budget(tokens, max_items=8, max_frames=64) for tokens in (31, 32))
    assert (one.max_items, one.max_crops, two.max_items, two.max_crops) == (1, 3, 2, 0)
    assert one.fits(tower.footprint(Grid(4, 1, 3)), 1)
    assert not two.fits(tower.footprint(Grid(2, 1, 1)), 1), "it has no room for a crop, though for its tokens"
    small = total([tower.footprint(Grid(1, 1, 1))] * 2)
    assert two.fits(small, 2)
    assert not one.fits(small, 2)


def test_samples_fill_a_budget_of_two_views(tower: CropEncoder) -> None:
    for size in tower.sizes(600):
        budget = tower.budget(size, max_items=64, max_frames=64)
        assert budget.tokens == size
        load = total([tower.footprint(grid) for grid in tower.samples(size, budget.max_items)])
        assert (load.tokens, load.crops) == (size, budget.max_crops)


def test_planner_covers_items_of_two_views(tower: CropEncoder) -> None:
    ladder = Ladder(tuple(tower.budget(size, max_items=64, max_frames=64) for size in tower.sizes(300)))
    planner = Planner(ladder, Bounds(300, 64, 512), without_graph=Fallback.GRAPHS_OFF)
    crops = [0, 3, 1, 0, 0, 12, 2, 64, 0, 5]
    items = [tower.footprint(Grid(1 + n, 1, max(1, n))) for n in crops]
    plan = planner.plan(items)
    assert sorted(item for batch in plan.batches for item in batch.items) == list(range(len(items)))
    for batch in plan.batches:
        if batch.budget:
            assert batch.budget.fits(total([items[item] for item in batch.items]), len(batch.items))


@pytest.mark.parametrize("tokens", [None, 84], ids=["exact", "padded"])
def test_rows_of_an_item_are_its_crops_then_its_view(tower: CropEncoder, tokens: int | None) -> None:
    grids = [Grid(1, 1, 1), Grid(3, 1, 2), Grid(2, 1, 1)]
    capacity = tower.exact(grids)
    if tokens:
        budget = tower.budget(tokens, max_items=8, max_frames=64)
        capacity = tower.capacity(budget)
    metadata = tower.reserve(capacity)
    pixels = torch.full((capacity.patches, tower.geometry.row), torch.nan)
    metadata.crops = torch.full((capacity.crops, tower.geometry.crop_row), torch.nan)
    pixels[:3] = torch.tensor([1.0, 2.0, 3.0])[:, None]
    metadata.crops[:3] = torch.tensor([10.0, 20.0, 30.0])[:, None]
    tower.prepare(grids, metadata)
    rows = tower.split(tower.forward(pixels, metadata), [tower.footprint(grid) for grid in grids])
    shown = [[(float(mean), int(number)) for mean, number in own] for own in rows]
    tile, crop = range(TILE.tokens), range(CROP.tokens)
    assert shown[0] == [(1.0, n) for n in tile]
    assert shown[1] == [(10.0, n) for n in crop] + [(20.0, n) for n in crop] + [(2.0, n) for n in tile]
    assert shown[2] == [(30.0, n) for n in crop] + [(3.0, n) for n in tile]


def test_a_batch_that_is_too_large_is_refused(tower: CropEncoder) -> None:
    metadata = tower.reserve(tower.exact([Grid(2, 1, 1)]))
    with pytest.raises(ValueError, match="do not fit"):
        tower.prepare([Grid(3, 1, 2)], metadata)


def test_a_slab_zeroes_what_an_earlier_batch_left(tower: CropEncoder) -> None:
    buffer = InputBuffer(8, 2, tower)
    for used, capacity in ((6, 8), (2, 4), (1, 8), (8, 8), (3, 3), (0, 5)):
        buffer.take(used, capacity).fill_(float(used))
        assert (buffer.tensor[used:capacity] == 0).all()
        assert (buffer.tensor[:used] == used).all()
    with pytest.raises(ValueError, match="do not fit"):
        buffer.take(5, 4)
