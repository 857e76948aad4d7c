"""Passes planned from sizes alone give Pillow's bytes, by every rule; here torch follows them on the host."""

from collections import Counter

import numpy as np
import pytest
import torch

from prepared import MODELS, recipe, tiled, within
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Resizing
from vitwire_server.core.tilings import Tiling, TilingRule
from vitwire_server.preparing import pillow
from vitwire_server.preparing.device import checks, passes
from vitwire_server.preparing.device.passes import program
from vitwire_server.preparing.device.resizing import prepared
from vitwire_server.preparing.device.tables import Axis, Field, Memory
from vitwire_server.preparing.rules.forms import form_of
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.preparing.rules.sketches import Canvas, Frame, Sketch

SIZES = [(300, 400), (57, 55), (20, 90), (8, 160), (400, 21), (90, 301), (112, 112), (56, 56)]


def drawn(*shape: int) -> np.ndarray:
    """Noise between hard edges, so that both rounding and order show."""
    rng = np.random.default_rng(shape[-2])
    return np.where(rng.random(shape) < 0.5, rng.integers(0, 256, shape), rng.choice([0, 255], shape)).astype(np.uint8)


def assert_as_pillow(picture: np.ndarray, own: Recipe) -> None:
    try:
        expected = pillow.prepared(picture, own)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error).partition(":")[0]):
            prepared(torch.from_numpy(picture), own)
        return
    pixels, crops = prepared(torch.from_numpy(picture), own)
    np.testing.assert_array_equal(pixels, expected.pixels.reshape(len(expected.pixels), -1))
    assert (crops is None) == (expected.crops is None)
    if crops is not None and expected.crops is not None:
        np.testing.assert_array_equal(crops, expected.crops.reshape(len(expected.crops), -1))
    if picture.ndim == 3:
        within(program(picture.shape[:2], own), picture.size)
        assert expected.grid == form_of(picture.shape, own).grid


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_images(name: str, size: tuple[int, int]) -> None:
    assert_as_pillow(drawn(*size, 3), MODELS[name][Modality.IMAGE])


def test_other_tilings() -> None:
    """Rules whose settings change what they are made of."""
    layouts = ((1, 1), (1, 2), (2, 1))
    for tiling in (
        Tiling(TilingRule.STRETCH, (40, 56)),
        Tiling(TilingRule.SQUARE, (56, 56), background=(200, 100, 0), min_side=9),
        Tiling(TilingRule.SQUARE, (56, 56), crop=(56, 56), crop_background=(1, 2, 3), crop_resample=2),
        Tiling(TilingRule.SQUARE, (96, 96), background=(7, 8, 9), crop=(56, 56), crop_background=(1, 2, 3)),
        Tiling(TilingRule.CENTER_CROP, (56, 56), min_side=64),
        Tiling(TilingRule.CENTER_CROP, (56, 56), min_side=56),
        Tiling(TilingRule.WHOLE_TILES, (56, 56), max_side=112, max_tiles=9),
        Tiling(TilingRule.WHOLE_TILES, (56, 56), max_side=112),
        Tiling(TilingRule.LEAST_SCALING, (56, 56), max_tiles=6),
        Tiling(TilingRule.BEST_FIT, (56, 56), layouts=layouts, background=(255, 0, 3)),
        Tiling(TilingRule.WINDOWS, (56, 56), max_side=200, crop=(40, 40), max_tiles=20),
    ):
        for resample in (1, 3):
            for size in ((112, 112), (56, 57), (200, 90), (31, 301), (56, 56), (64, 64)):
                assert_as_pillow(drawn(*size, 3), tiled(tiling, resample))


@pytest.mark.parametrize("resizing", [rule for rule in Resizing if rule is not Resizing.OTHER])
def test_patches(resizing: Resizing) -> None:
    for merge, raster, last in ((2, False, False), (1, True, True), (2, True, False)):
        for resample in range(6):
            own = recipe(
                patch=8, merge=merge, temporal=2, raster=raster, channels_last=last,
                min_pixels=32 * 32, max_pixels=96 * 96, resizing=resizing, resample=resample,
            )  # fmt: skip
            for size in ((70, 50), (20, 90), (200, 130), (64, 64), (64, 50)):
                assert_as_pillow(drawn(*size, 3), own)


@pytest.mark.parametrize("frames", [2, 3, 5])
@pytest.mark.parametrize("name", ["patches", "ratio", "canvas"])
def test_clips(name: str, frames: int) -> None:
    assert_as_pillow(drawn(frames, 60, 90, 3), MODELS[name][Modality.VIDEO])


def test_clips_with_channels_last() -> None:
    own = recipe(patch=8, merge=2, temporal=3, channels_last=True, min_pixels=32 * 32, max_pixels=96 * 96)
    assert_as_pillow(drawn(4, 60, 90, 3), own)


def test_random_sizes() -> None:
    rng = np.random.default_rng(5)
    for models in MODELS.values():
        for size in rng.integers(1, 260, (6, 2)).tolist():
            if max(size) < 150 * min(size):
                assert_as_pillow(drawn(*size, 3), models[Modality.IMAGE])


@pytest.mark.parametrize("name", MODELS)
def test_pictures_are_compared_with_pillow_at_start(name: str) -> None:
    assert checks.fault_of(MODELS[name], torch.device("cpu"), torch.bfloat16) == ""


def test_a_difference_from_pillow_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {Modality.IMAGE: MODELS["patches"][Modality.IMAGE]}
    monkeypatch.setattr(passes, "_CHOOSES_ORDER", not passes._CHOOSES_ORDER)
    program.cache_clear()
    try:
        assert "differs from what Pillow" in checks.fault_of(own, torch.device("cpu"), torch.float32)
    finally:
        program.cache_clear()


# -- sketches ----------------------------------------------------------------------------------------

WHOLE = Sketch(Frame((40, 60)), (0, 0), (40, 60), 3)


def test_parts_end_at_the_border() -> None:
    part = WHOLE.part((30, 10), (20, 20)).part((2, 0), (50, 5))
    assert part == Sketch(Frame((40, 60)), (32, 10), (8, 5), 3)
    assert WHOLE.at((40, 60)) is WHOLE


def test_what_is_placed_twice_or_cut_before_is_copied() -> None:
    """A canvas knows one background: otherwise another is made of it."""
    resized = WHOLE.at((20, 30))
    once = resized.placed((30, 30), (5, 0), (1, 2, 3))
    assert once.of == Canvas(WHOLE, (20, 30), 3, (5, 0), (30, 30), (1, 2, 3))
    twice = once.placed((50, 50), (0, 9), (4, 5, 6))
    assert twice.of == Canvas(once, (30, 30), 0, (0, 9), (50, 50), (4, 5, 6))
    part = resized.part((0, 0), (8, 8))
    assert part.placed((9, 9), (0, 0), ()).of == Canvas(part, (8, 8), 0, (0, 0), (9, 9), ())


# -- how many passes ---------------------------------------------------------------------------------


def axes_of(size: tuple[int, int], own: Recipe) -> list[Counter[Axis]]:
    """How often each level, and the last passes, sum along which axis."""
    made = program(size, own)
    return [Counter(Axis(axis) for axis in table[:, Field.AXIS]) for table in (*made.levels, made.last)]


def test_a_photograph_takes_two_passes() -> None:
    own = MODELS["patches"][Modality.IMAGE]
    assert axes_of((500, 700), own) == [Counter({Axis.COLUMNS: 1}), Counter({Axis.ROWS: 1})]


def test_an_axis_that_stays_takes_none() -> None:
    own = tiled(Tiling(TilingRule.STRETCH, (56, 56)))
    assert axes_of((56, 56), own) == [Counter({Axis.NONE: 1})]
    assert axes_of((80, 56), own) == [Counter({Axis.ROWS: 1})]
    assert axes_of((56, 80), own) == [Counter({Axis.COLUMNS: 1})]
    assert program((56, 80), own).scratch == 0


@pytest.mark.skipif(not passes._CHOOSES_ORDER, reason="Pillow 12 resizes columns first")
def test_rows_come_first_where_that_saves_work() -> None:
    own = tiled(Tiling(TilingRule.STRETCH, (56, 56)))
    assert axes_of((500, 60), own) == [Counter({Axis.ROWS: 1}), Counter({Axis.COLUMNS: 1})]


def test_all_tiles_share_a_first_pass_and_the_overview_has_its_own() -> None:
    own = MODELS["ratio"][Modality.IMAGE]
    first, last = axes_of((200, 300), own)
    assert first == Counter({Axis.COLUMNS: 2})
    assert last == Counter({Axis.ROWS: 7}), "six tiles and an overview"


def test_a_picture_that_is_resized_again_is_kept_once() -> None:
    """The crop comes out of scratch, and so does what the tile is made of."""
    made = program((200, 300), MODELS["square"][Modality.IMAGE])
    assert len(made.levels) == 3
    assert sorted(zip(made.targets, made.sources[-1], strict=True)) == [
        (Memory.PIXELS, Memory.SCRATCH),
        (Memory.CROPS, Memory.SCRATCH),
    ]
    assert Counter(made.last[:, Field.AXIS].tolist()) == Counter({Axis.NONE: 1, Axis.ROWS: 1})
