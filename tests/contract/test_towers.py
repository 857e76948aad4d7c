"""What every row of the table of models must hold, run over every row."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoints import ROWS, Checkpoints, graphs_and_packing
from host_tensors import NoHostTensors
from reference import TOLERANCE, Array, Reference, error, norm_error
from rigs import BUDGETS, Rig, draw_grids, takes
from tile_reference import TileReference
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import TileGeometry
from vitwire_server.runtime.attention.selection import select
from vitwire_server.scheduling.groups import parts_of
from vitwire_server.towers.checkpoints.checkpoint import load_tower, open_checkpoint
from vitwire_server.towers.family import Accepts
from vitwire_server.towers.layouts import patches
from vitwire_server.towers.layouts.packed import AttentionSpan
from vitwire_server.towers.registry import FAMILIES

Rigs = Callable[..., Rig]
References = Callable[[str, torch.dtype], Reference | TileReference]
CPU = torch.device("cpu")
ROUNDED = ("qwen2_5_vl", "qwen3_vl", "internvl_chat", "deepseek_ocr2", "siglip2")
"""Models whose bfloat16 the everyday suite compares: it takes as long as all else about a model."""
_EXPECTED: dict[tuple[Any, ...], list[Array]] = {}


def expected(rig: Rig, reference: Reference | TileReference, grids: list[Grid], seed: int = 0) -> list[Array]:
    """Rows of `rig.items(grids, seed)`, each alone; computed once a session."""
    key = (id(reference), rig.tower.dtype, tuple(grids), seed)
    if key not in _EXPECTED:
        _EXPECTED[key] = [
            reference.item(grid, rig.pixels(grid, seed + i), rig.crops(grid, seed + i)) for i, grid in enumerate(grids)
        ]
    return _EXPECTED[key]


@pytest.fixture(scope="module")
def rigs(checkpoints: Checkpoints) -> Rigs:
    made: dict[tuple[str, torch.dtype, bool], Rig] = {}

    def rig(model_type: str, dtype: torch.dtype = torch.float32, *, graphs: bool) -> Rig:
        key = (model_type, dtype, graphs)
        if key not in made:
            made[key] = Rig.of(checkpoints(model_type), dtype, CPU, sizes=BUDGETS if graphs else ())
        return made[key]

    return rig


@pytest.mark.parametrize("model_type", ROWS)
class TestParity:
    """Images and clips of random grids, alone and with others, against plain transformers."""

    @graphs_and_packing
    def test_float32_equals_transformers(
        self, model_type: str, graphs: bool, packed: bool, rigs: Rigs, references: References
    ) -> None:
        rig, reference = rigs(model_type, graphs=graphs), references(model_type, torch.float32)
        grids = draw_grids(rig, 1, 12)
        items = rig.items(grids)
        encoded = rig.run(items) if packed else [rig.run([item])[0] for item in items]
        errors = {
            str(grid): error(own, other)
            for grid, own, other in zip(grids, encoded, expected(rig, reference, grids), strict=True)
        }
        assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("model_type", ROWS)
def test_a_clip_equals_its_parts(model_type: str, rigs: Rigs) -> None:
    rig, grid = rigs(model_type, graphs=True), Grid(5, 12, 8)
    if not rig.tower.clip_groups:
        assert not model_type.startswith("qwen")
        return
    clip = replace(rig.item(grid, rig.pixels(grid, 3)), modality=Modality.VIDEO, in_groups=True)
    (whole,), parts = rig.run([clip]), list(parts_of(clip, 8 * 24, rig.tower.geometry.temporal))
    assert (len(parts), error(np.concatenate(rig.run(parts)), whole) <= TOLERANCE) == (3, True)


@pytest.mark.parametrize(
    "model_type", [each if each in ROUNDED else pytest.param(each, marks=pytest.mark.matrix) for each in FAMILIES]
)
@pytest.mark.parametrize(
    ("graphs", "packed"),
    [
        pytest.param(False, False, id="off-alone", marks=pytest.mark.matrix),
        pytest.param(False, True, id="off-packed", marks=pytest.mark.matrix),
        pytest.param(True, False, id="simulated-alone", marks=pytest.mark.matrix),
        pytest.param(True, True, id="simulated-packed"),
    ],
)
def test_bfloat16_loses_no_more_than_transformers_does(
    model_type: str, graphs: bool, packed: bool, rigs: Rigs, references: References
) -> None:
    rig = rigs(model_type, torch.bfloat16, graphs=graphs)
    grids = [grid for grid in draw_grids(rig, 2, 12) for _ in range(draws(rig, grid))]
    items = rig.items(grids)
    encoded = rig.run(items) if packed else [rig.run([item])[0] for item in items]
    exact = expected(rig, references(model_type, torch.float32), grids)
    rounded = expected(rig, references(model_type, torch.bfloat16), grids)
    ours, theirs = (means(grids, map(norm_error, rows, exact)) for rows in (encoded, rounded))
    assert np.mean(ours) <= 1.1 * np.mean(theirs)
    assert max(ours) <= 1.1 * max(theirs)


def draws(rig: Rig, grid: Grid) -> int:
    """How often to draw pixels of a grid: few tokens are few roundings, and luck decides."""
    return 6 if rig.tower.footprint(grid).tokens < 64 else 1


def means(grids: list[Grid], losses: Iterable[float]) -> list[float]:
    """The mean loss of each grid."""
    drawn: dict[Grid, list[float]] = {}
    for grid, loss in zip(grids, losses, strict=True):
        drawn.setdefault(grid, []).append(loss)
    return [float(np.mean(own)) for own in drawn.values()]


@pytest.mark.parametrize("model_type", ROWS)
class TestGraphs:
    """Static buffers: what lies in them from before must never reach a result."""

    def test_poisoned_buffers_and_reuse_change_nothing(
        self, model_type: str, rigs: Rigs, references: References
    ) -> None:
        rig, reference = rigs(model_type, graphs=True), references(model_type, torch.float32)
        small, *larger = sorted(draw_grids(rig, 4, 8), key=rig.tower.geometry.patches)
        for grids in ([small], larger[-4:-2], [small], larger[:1]):
            rig.poison()
            for rows, other in zip(rig.run(rig.items(grids, 7)), expected(rig, reference, grids, 7), strict=True):
                assert error(rows, other) <= TOLERANCE

    def test_non_finite_pixels_of_one_item_reach_no_other(
        self, model_type: str, rigs: Rigs, references: References
    ) -> None:
        rig, reference = rigs(model_type, graphs=True), references(model_type, torch.float32)
        large, small = Grid(2, 1, 2) if tiled(rig) else Grid(1, 12, 12), half(rig)
        large = large if takes(rig, large) else small
        crops = rig.crops(large, 0)
        hole = torch.full_like(rig.pixels(large, 0), torch.nan)
        nan = rig.item(large, hole, torch.full_like(crops, torch.nan) if crops is not None else None)
        good = rig.items([small], 3)[0]
        budget = rig.holding([good, nan])
        (refused,) = rig.engine.launch([nan], budget).collect().results
        assert isinstance(refused, Exception), "a non-finite embedding is never returned"
        first, second = rig.engine.launch([good, nan], budget).collect().results
        assert isinstance(second, Exception)
        assert not isinstance(first, Exception)
        rows = np.frombuffer(first.data, np.float32).reshape(first.shape)
        assert error(rows, expected(rig, reference, [small], 3)[0]) <= TOLERANCE


@pytest.mark.parametrize("model_type", ROWS)
def test_forward_runs_on_the_meta_device(model_type: str, checkpoints: Checkpoints) -> None:
    """No host synchronisation, no data-dependent shape and no tensor on the host: each would raise here.

    Whatever metadata is left out would be computed in the forward, which raises.
    """
    checkpoint = open_checkpoint(str(checkpoints(model_type)))
    tower = load_tower(checkpoint, dtype=torch.bfloat16, device=CPU).tower
    for module in tower.modules.values():
        module.to("meta")
    choice = select(
        "auto", tower.device, tower.dtype, *tower.attention_heads, captured=True, resampler=tower.resampler_heads
    )
    tower.use_attention(choice.implementation)
    budget = tower.budget(64, max_items=8, max_frames=16)
    capacity = tower.capacity(budget)
    pixels = torch.empty(capacity.patches, tower.geometry.row, dtype=torch.bfloat16, device="meta")
    metadata = tower.reserve(capacity)
    if tower.geometry.crop_row:
        metadata.crops = pixels.new_empty(capacity.crops, tower.geometry.crop_row)
    with NoHostTensors():
        rows = tower.forward(pixels, metadata)
    assert rows.shape == (tower.rows(capacity), tower.geometry.width)
    # Ends of whole clips are summed up on the device.
    of_clips = getattr(checkpoint.family, "span", None) is AttentionSpan.CLIP
    needed = metadata.tensors.keys() - ({"cu_seqlens"} if of_clips else set())
    for key in needed:
        incomplete = {k: v for k, v in metadata.tensors.items() if k != key}
        with pytest.raises((RuntimeError, NotImplementedError, ValueError, KeyError)):
            tower.forward(pixels, replace(metadata, tensors=incomplete))


def test_metadata_that_is_kept_is_bounded_in_bytes(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that are resampled ahead are a row of columns for each patch."""
    tower = Rig.of(checkpoints("siglip2"), torch.float32, CPU, sizes=()).tower
    assert isinstance(tower, patches.PatchTower)
    monkeypatch.setattr(patches, "_KEPT_BYTES", 20_000)
    for width in range(2, 12):
        tower.prepare([Grid(1, 4, width)], tower.reserve(tower.exact([Grid(1, 4, width)])))
    kept = tower._measured
    assert list(kept) == [Grid(1, 4, 11)], "one of them has 11 KB"
    assert tower._kept_bytes == sum(tensor.nbytes for own in kept.values() for tensor in own.values())


@pytest.mark.parametrize("model_type", ROWS)
class TestItems:
    """What an item is said to cost and to give, and the forms that its pixels may have."""

    def test_footprint_is_what_the_model_returns(self, model_type: str, rigs: Rigs, references: References) -> None:
        rig, reference = rigs(model_type, graphs=False), references(model_type, torch.float32)
        grids = draw_grids(rig, 3, 8)
        for grid, rows in zip(grids, expected(rig, reference, grids), strict=True):
            footprint = rig.tower.footprint(grid)
            assert rows.shape == (footprint.rows, rig.tower.geometry.width)
            assert footprint.patches == len(rig.pixels(grid, 0))
            assert footprint.crops == len(rig.crops(grid, 0) if rig.crops(grid, 0) is not None else ())
            assert footprint.longest * footprint.segments >= footprint.patches

    def test_the_row_says_what_the_tower_takes(self, model_type: str, rigs: Rigs) -> None:
        rig, family = rigs(model_type, graphs=False), FAMILIES[model_type]
        assert (Modality.VIDEO in rig.modalities) is (family.videos is not Accepts.NOTHING)
        assert family.videos is Accepts.NOTHING or rig.tower.geometry.prunes is family.prunes

    def test_rows_depend_on_the_pixels(self, model_type: str, rigs: Rigs) -> None:
        rig = rigs(model_type, graphs=False)
        grid = draw_grids(rig, 3, 1)[0]
        first, second = rig.run([*rig.items([grid], 1), *rig.items([grid], 2)])
        assert norm_error(first, second) > 0.05

    def test_uint8_equals_normalised_floats(self, model_type: str, rigs: Rigs) -> None:
        rig = rigs(model_type, graphs=True)
        grid = half(rig) if tiled(rig) else Grid(1, 12, half(rig).w)
        settings = rig.modalities[Modality.IMAGE]
        raw, crops = (
            torch.randint(0, 256, own.shape, dtype=torch.uint8) if own is not None else None
            for own in (rig.pixels(grid, 0), rig.crops(grid, 0))
        )
        assert raw is not None
        full = normalised(rig, raw, settings.mean, settings.std, settings.rescale_factor)
        full_crops = crops
        if crops is not None:
            means = settings.crop_mean or settings.mean, settings.crop_std or settings.std
            full_crops = normalised(rig, crops, *means, settings.rescale_factor)
        compact, other = rig.run([rig.item(grid, raw, crops), rig.item(grid, full, full_crops)])
        assert error(compact, other) <= TOLERANCE

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
    def test_single_frame_images_equal_duplicated_ones(self, model_type: str, dtype: torch.dtype, rigs: Rigs) -> None:
        rig = rigs(model_type, graphs=False)
        geometry = rig.tower.geometry
        if tiled(rig) or geometry.temporal == 1:
            pytest.skip("its images have one frame")
        grid = Grid(1, 8, 10)
        single = torch.randint(0, 256, (grid.patches, geometry.channels, 1, geometry.patch**2)).to(dtype)
        doubled = single.expand(-1, -1, geometry.temporal, -1).reshape(grid.patches, -1)
        first, second = (rig.run([rig.item(grid, x)])[0] for x in (single.flatten(1), doubled))
        np.testing.assert_array_equal(first, second)

    def test_rotary_frequencies_stay_float32(self, model_type: str, rigs: Rigs) -> None:
        half, full = (rigs(model_type, dtype, graphs=False).tower.model for dtype in (torch.bfloat16, torch.float32))
        for (name, buffer), (_, exact) in zip(half.named_buffers(), full.named_buffers(), strict=True):
            assert torch.equal(buffer, exact), name


def half(rig: Rig) -> Grid:
    """A square of about half of twelve patches a side, in whole tokens; of tiles, the smallest image."""
    if tiled(rig):
        return next(grid for grid in (Grid(1, 1, 1), Grid(2, 1, 1)) if takes(rig, grid))
    side = 4 if rig.tower.geometry.merge == 4 else 6
    return Grid(1, side, side)


def tiled(rig: Rig) -> bool:
    return isinstance(rig.tower.geometry, TileGeometry)


def normalised(rig: Rig, raw: Tensor, mean: tuple[float, ...], std: tuple[float, ...], factor: float) -> Tensor:
    """uint8 pixels as the processor would have emitted them."""
    geometry = rig.tower.geometry
    last = geometry.channels_last
    shaped = (
        raw.double().view(len(raw), -1, geometry.channels)
        if last
        else raw.double().view(len(raw), geometry.channels, -1)
    )
    form = (-1,) if last else (-1, 1)
    return ((shaped * factor - torch.tensor(mean).view(form)) / torch.tensor(std).view(form)).float().view(raw.shape)
