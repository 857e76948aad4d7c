"""Outputs of authors' own processors: MiniCPM-V's slices, and what its tower needs of them; DeepSeek-VL2's tiles."""

from typing import Any

import numpy as np
import pytest
import torch

from vitwire import InvalidItem, Item
from vitwire_server.core.capacities import ResampledCapacities
from vitwire_server.core.footprints import ResampledFootprints
from vitwire_server.core.geometries import ResampledGeometry
from vitwire_server.core.grids import Grid
from vitwire_server.towers.models.minicpm import _nearest

SIDE = 4
SIZES = [[(3, 5), (2, 2)], [], [(1, 7)]]
"""Of two prompts' slices; a prompt between them has none."""


def slices() -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [[rng.normal(size=(3, h * SIDE, w * SIDE)).astype(np.float32) for h, w in own] for own in SIZES]


def side_by_side(image: Any) -> Any:
    """Patches of an image `(3, H, W)` as `(3, side, patches * side)`, as the processor's reshape_by_patch does."""
    columns = torch.nn.functional.unfold(torch.as_tensor(image)[None], SIDE, stride=SIDE)[0]
    return columns.view(3, SIDE, SIDE, -1).permute(0, 1, 3, 2).reshape(3, SIDE, -1)


def outputs(**changes: Any) -> dict[str, Any]:
    pixels = [[side_by_side(image) for image in own] for own in slices()]
    return {"pixel_values": pixels, "tgt_sizes": [torch.tensor(own) for own in SIZES], **changes}


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_each_slice_becomes_an_item(kind: str) -> None:
    given = outputs()
    if kind == "numpy":
        given = {"pixel_values": [[x.numpy() for x in own] for own in given["pixel_values"]], "tgt_sizes": SIZES}
    items = Item.from_processor(given)
    assert [item.grid for item in items] == [(1, 3, 5), (1, 2, 2), (1, 1, 7)]
    for item, image in zip(items, (each for own in slices() for each in own), strict=True):
        _, h, w = item.grid
        patches = image.reshape(3, h, SIDE, w, SIDE).transpose(1, 3, 0, 2, 4).reshape(h * w, -1)
        np.testing.assert_array_equal(np.asarray(item.pixels), patches)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tgt_sizes": [[(3, 5)], [], [(1, 7)]]}, "has 3 slices, tgt_sizes has 2"),
        ({"tgt_sizes": [[(3, 5), (2, 3)], [], [(1, 7)]]}, r"pixel_values\[1\]: has 16 columns, .* needs 6 patches"),
        ({"tgt_sizes": [(3, 5), 4]}, "expected a list of pairs"),
        ({"pixel_values": torch.zeros(3, 8)}, "expected slices"),
    ],
)
def test_sizes_that_contradict_the_slices_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidItem, match=message):
        Item.from_processor(outputs(**changes))


def test_a_slice_costs_its_patches_and_becomes_as_many_rows_as_queries() -> None:
    for grid in (Grid(1, 30, 34), Grid(1, 5, 3)):
        footprint = ResampledFootprints(64)(grid)
        assert (footprint.patches, footprint.tokens, footprint.segments) == (grid.patches, grid.patches, 1)
        assert footprint.rows == 64


def test_sides_of_an_image_are_bounded() -> None:
    geometry = ResampledGeometry(14, 1, 1, 3, 8, 0, longest_side=1024)
    assert not list(geometry.wrong(Grid(1, 3, 1024), None))
    assert [side for side, _ in geometry.wrong(Grid(1, 1, 1025), None)] == ["w"]


@pytest.mark.parametrize(("tokens", "budgeted", "images"), [(16, 64, 1), (300, 300, 1), (4096, 4096, 16)])
def test_a_budget_holds_an_image_and_has_few_slots(tokens: int, budgeted: int, images: int) -> None:
    budget = ResampledCapacities(64).budget(tokens, max_items=64, max_frames=256)
    assert (budget.tokens, budget.max_segments, budget.max_items) == (budgeted, images, images)


def test_every_length_has_a_position_for_each_patch() -> None:
    for count in range(1, 1025):
        positions = _nearest(count, 70)
        assert len(positions) == count
        assert positions.min() == 0
        assert positions.max() <= 69
        assert (positions.diff() >= 0).all()


@pytest.mark.parametrize("crops", [[[2, 1], [1, 1]], [[[2, 1], [0, 0]], [[1, 1], [0, 0]]]], ids=["flat", "padded"])
def test_tiles_come_beside_one_of_the_whole_image(crops: list[Any]) -> None:
    given = {"pixel_values": torch.zeros(5, 3, 8, 8), "images_spatial_crop": torch.tensor(crops)}
    assert [item.grid for item in Item.from_processor(given)] == [(3, 1, 2), (2, 1, 1)]
    with pytest.raises(InvalidItem, match=r"images_spatial_crop\[0\]: needs rows 0 to 6 of pixel_values, which has 4"):
        Item.from_processor({**given, "pixel_values": torch.zeros(4, 3, 8, 8)})
    with pytest.raises(InvalidItem, match=r"expected pairs \(columns, rows\)"):
        Item.from_processor({**given, "images_spatial_crop": torch.tensor([2, 1])})
