"""Towers whose rows are put together from those of tiles: what budgets are timed and calibrated with."""

import pytest

import broken
from checkpoints import Checkpoints
from vitwire_server.assembling.capturing import bounds_of, default_ladder
from vitwire_server.config.settings import ServeSettings
from vitwire_server.core.budgets import Ladder
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality, total
from vitwire_server.towers.tower import Tower


def ladder_of(settings: ServeSettings, tower: Tower) -> Ladder:
    return default_ladder(settings, bounds_of(settings, tower), tower, "simulated")


@pytest.mark.parametrize("model_type", ["aria", "mllama", "moondream3", "phi3_v", "phi4_multimodal"])
def test_samples_fit_their_budgets(model_type: str, checkpoints: Checkpoints) -> None:
    tower = broken.load(checkpoints(model_type)).tower
    sizes = tower.sizes(3000)
    assert len(sizes) > 5
    for tokens in (1, *sizes):
        for items in (1, 3, 64):
            budget = tower.budget(tokens, max_items=items, max_frames=64)
            assert budget.tokens in sizes
            grids = tower.samples_for(budget)
            load = total([tower.footprint(grid) for grid in grids])
            assert budget.fits(load, len(grids)), (budget, grids)
            assert load.patches <= tower.capacity(budget).patches
            assert not [wrong for grid in grids for wrong in tower.geometry.wrong(grid, Modality.IMAGE)]


def bounded(tokens: int) -> ServeSettings:
    """With `--max-budget-tokens`."""
    return ServeSettings(model="m", max_budget_tokens=tokens, given=frozenset({"max_budget_tokens"}))


def test_a_bound_below_the_smallest_budget_is_reported(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    """An image of Llama 3.2 Vision has 6404 tokens, which is more than the default of --max-budget-tokens."""
    tower = broken.load(checkpoints("mllama")).tower
    assert len(ladder_of(bounded(68), tower)) == 1
    assert not caplog.messages
    assert not ladder_of(bounded(67), tower).budgets
    assert "smallest budget of this model has 68 tokens, but --max-budget-tokens is 67" in caplog.text


def test_the_default_bound_holds_an_image(checkpoints: Checkpoints) -> None:
    tower = broken.load(checkpoints("mllama")).tower
    default = ServeSettings(model="m", max_budget_tokens=67)
    assert len(ladder_of(default, tower)) == 1
    assert bounds_of(bounded(67), tower).tokens == 67


def test_what_does_not_fit_is_refused(checkpoints: Checkpoints) -> None:
    tower = broken.load(checkpoints("mllama")).tower
    metadata = tower.reserve(tower.exact([Grid(4, 2, 2)]))
    tower.prepare([Grid(1, 1, 1)], metadata)
    with pytest.raises(ValueError, match="2 units of tiles do not fit"):
        tower.prepare([Grid(1, 1, 1)] * 2, metadata)


@pytest.mark.parametrize("grid", [Grid(1, 1, 1), Grid(4, 2, 2), Grid(3, 1, 1)])
def test_a_layout_without_its_overview_is_refused(grid: Grid, checkpoints: Checkpoints) -> None:
    geometry = broken.load(checkpoints("moondream3")).tower.geometry
    (wrong,) = geometry.wrong(grid, Modality.IMAGE)
    side, reason = wrong
    assert side == "t"
    assert f"must be {1 + grid.h * grid.w} for {grid.h} rows and {grid.w} columns" in reason
