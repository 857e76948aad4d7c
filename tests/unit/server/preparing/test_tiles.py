"""Tiles of images against the stock Hugging Face processors, on Pillow, within 2 of 255."""

from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.deepseek_vl_hybrid.image_processing_pil_deepseek_vl_hybrid import (
    DeepseekVLHybridImageProcessorPil,
)
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.granite_docling.image_processing_pil_granite_docling import GraniteDoclingImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil, get_min_tile_covering_grid

import prepared
from ovis_reference import original_tiles
from prepared import tiled
from published_processors import deepseek_vl2_tiles, eagle_tiles, h2ovl_tiles, moondream_crops
from vitwire._inputs.layouts import layouts_of
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.preparing.pillow import Tiles
from vitwire_server.preparing.rules.layouts import covering_layout

SIZES = [
    (64, 40),
    (200, 90),
    (90, 301),
    (400, 7),
    *(
        pytest.param(size, marks=pytest.mark.matrix)
        for size in ((30, 30), (40, 100), (56, 56), (57, 55), (113, 224), (12, 300), (2, 2))
    ),
]
BACKGROUND, SQUARE = (122, 116, 104), {"height": 56, "width": 56}
PLAIN = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
"""Leaves the stock processors' pixels as they are after resizing and cutting."""


def picture(height: int, width: int) -> np.ndarray:
    """Smooth noise, so that filters differ and rounding does not hide it."""
    rng = np.random.default_rng(height * 1000 + width)
    coarse = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3)).astype(np.float64)
    rows, columns = np.linspace(0, len(coarse) - 1, height), np.linspace(0, coarse.shape[1] - 1, width)
    fine = coarse[rows.astype(int)][:, columns.astype(int)]
    return np.clip(fine + rng.normal(0, 6, fine.shape), 0, 255).astype(np.uint8)


def ours(image: np.ndarray, tiling: Tiling, resample: int = 3) -> Tiles:
    return prepared.image(image, tiled(tiling, resample))


def assert_near(mine: np.ndarray, theirs: Any) -> None:
    other = np.asarray(theirs)
    assert mine.shape == other.shape
    assert mine.dtype == np.uint8
    assert np.abs(mine.astype(np.float64) - other).max() <= 2


@pytest.fixture
def image(size: tuple[int, int]) -> np.ndarray:
    return picture(*size)


@pytest.mark.parametrize("size", SIZES)
class TestAgainstStock:
    """Pixels, layout and order of the tiles of images of all shapes."""

    @pytest.mark.parametrize("most", [6, 12, 2, 1])
    def test_h2ovl_and_eagle(self, image: np.ndarray, most: int) -> None:
        for rule, tiles in ((TilingRule.TWO_RATIOS, h2ovl_tiles), (TilingRule.RATIO_AND_AREA, eagle_tiles)):
            mine = ours(image, Tiling(rule, (56, 56), Overview.LAST, max_tiles=most))
            theirs = tiles(Image.fromarray(image), 56, most)
            np.testing.assert_array_equal(mine.pixels, theirs.transpose(0, 3, 1, 2))
            assert rule is TilingRule.RATIO_AND_AREA or mine.grid == (len(theirs), 1, 1)

    @pytest.mark.parametrize("longest", [3, 2])
    def test_deepseek_vl2(self, image: np.ndarray, longest: int) -> None:
        layouts = [(rows, columns) for rows in range(1, longest + 1) for columns in range(1, longest + 1)]
        tiling = Tiling(TilingRule.PADDED_FIT, (56, 56), Overview.FIRST, layouts=tuple(layouts), background=(127,) * 3)
        theirs = deepseek_vl2_tiles(Image.fromarray(image), [(56 * w, 56 * h) for h, w in layouts], 127)
        mine = ours(image, tiling)
        np.testing.assert_array_equal(mine.pixels, theirs.transpose(0, 3, 1, 2))
        assert mine.grid[0] == len(theirs) == 1 + mine.grid[1] * mine.grid[2]

    @pytest.mark.parametrize(("fewest", "most"), [(1, 12), (1, 6), (2, 5), (1, 1)])
    def test_internvl(self, image: np.ndarray, fewest: int, most: int) -> None:
        stock = GotOcr2ImageProcessorPil(size=SQUARE, crop_to_patches=True)
        theirs = stock([image], min_patches=fewest, max_patches=most, **PLAIN)
        mine = ours(image, Tiling(TilingRule.CLOSEST_RATIO, (56, 56), Overview.LAST, fewest, most))
        assert_near(mine.pixels, theirs["pixel_values"])
        assert mine.grid[0] == len(mine.pixels)
        assert mine.grid[1] * mine.grid[2] in (len(mine.pixels), len(mine.pixels) - 1)

    @pytest.mark.parametrize("covering", [True, False])
    def test_ovis2(self, image: np.ndarray, covering: bool) -> None:
        stock = Ovis2ImageProcessorPil(size=SQUARE, crop_to_patches=True)
        theirs = stock([image], max_patches=9, use_covering_area_grid=covering, **PLAIN)
        mine = ours(image, Tiling(TilingRule.COVERING if covering else "closest_ratio", (56, 56), Overview.FIRST, 1, 9))
        assert_near(mine.pixels, theirs["pixel_values"])
        assert mine.grid[1:] == tuple(theirs["grids"][0])

    def test_aria(self, image: np.ndarray) -> None:
        theirs = AriaImageProcessorPil(max_image_size=490, min_image_size=168)([image], **PLAIN)
        mine = ours(image, Tiling(TilingRule.CORNER, (490, 490), min_side=168, patch=14))
        assert_near(mine.pixels, theirs["pixel_values"])
        mask = theirs["pixel_mask"][0].reshape(35, 14, 35, 14).any(axis=(1, 3))
        assert mine.grid == (1, mask[:, 0].sum(), mask[0].sum())

    def test_mllama(self, image: np.ndarray) -> None:
        theirs = MllamaImageProcessorPil(size=SQUARE)([image], **PLAIN)
        mine = ours(image, Tiling(TilingRule.CANVAS, (56, 56), max_tiles=4), resample=2)
        assert_near(mine.pixels, theirs["pixel_values"][0, 0, : mine.grid[0]])
        assert [[mine.grid[0]]] == theirs["num_tiles"]
        assert layouts_of(4)[theirs["aspect_ratio_ids"][0, 0] - 1] == mine.grid[1:]

    def test_llava_onevision(self, image: np.ndarray) -> None:
        layouts = [(rows, columns) for rows in (1, 2, 3) for columns in (1, 2, 3)]
        points = [[56 * rows, 56 * columns] for rows, columns in layouts]
        stock = LlavaOnevisionImageProcessorPil(size=SQUARE, image_grid_pinpoints=points)
        theirs = stock(image, **PLAIN)["pixel_values"][0]
        mine = ours(image, Tiling(TilingRule.BEST_FIT, (56, 56), Overview.FIRST, max_tiles=9, layouts=tuple(layouts)))
        assert_near(mine.pixels, theirs)
        assert mine.grid[0] == 1 + mine.grid[1] * mine.grid[2]

    @pytest.mark.parametrize(
        ("stock", "tiling", "resample"),
        [
            *(
                (
                    LlavaImageProcessorPil(size={"shortest_edge": shorter}, crop_size=SQUARE),
                    Tiling(TilingRule.CENTER_CROP, (56, 56), min_side=shorter),
                    3,
                )
                for shorter in (56, 63)
            ),
            (
                DeiTImageProcessorPil(size={"height": 64, "width": 64}, crop_size={"height": 56, "width": 42}),
                Tiling(TilingRule.STRETCHED_CROP, (56, 42), min_side=64),
                3,
            ),
            (Gemma3ImageProcessorPil(size=SQUARE), Tiling(TilingRule.STRETCH, (56, 56)), 2),
            (
                DeepseekVLImageProcessorPil(size=SQUARE),
                Tiling(TilingRule.SQUARE, (56, 56), background=BACKGROUND, min_side=14),
                3,
            ),
        ],
        ids=["llava", "llava, cut", "deit", "gemma3", "deepseek_vl"],
    )
    def test_one_tile(self, image: np.ndarray, stock: Any, tiling: Tiling, resample: int) -> None:
        mine = ours(image, tiling, resample)
        assert_near(mine.pixels, stock(image, **PLAIN)["pixel_values"])
        assert mine.grid == (1, 1, 1)

    def test_granite_docling(self, image: np.ndarray) -> None:
        stock = GraniteDoclingImageProcessorPil(size=SQUARE, max_patches=24)
        theirs = stock([image], **PLAIN)
        sides = range(1, 17)
        layouts = sorted(((r, c) for c in sides for r in sides if r * c <= 24), key=lambda pair: pair[0] * pair[1])
        mine = ours(
            image, Tiling(TilingRule.CLOSEST_RATIO, (56, 56), Overview.LAST, max_tiles=24, layouts=tuple(layouts))
        )
        assert_near(mine.pixels, theirs["pixel_values"][0])
        assert mine.grid[1:] == (theirs["rows"][0][0], theirs["cols"][0][0])

    @pytest.mark.parametrize(("longest", "cut"), [(224, True), (200, True), (50, True), (224, False)])
    def test_idefics3(self, image: np.ndarray, longest: int, cut: bool) -> None:
        edges: Any = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": 56}}
        theirs = Idefics3ImageProcessorPil(do_image_splitting=cut, **edges)(image, return_row_col_info=True, **PLAIN)
        most = 16 if cut else 1
        tiling = Tiling(
            TilingRule.WHOLE_TILES, (56, 56), Overview.LAST if cut else Overview.NONE, max_tiles=most, max_side=longest
        )
        mine = ours(image, tiling, resample=1)
        assert_near(mine.pixels, theirs["pixel_values"][0])
        assert bool(theirs["pixel_attention_mask"].all()), "tiles are full"
        layout = (theirs["rows"][0][0], theirs["cols"][0][0])
        assert mine.grid[1:] == (layout if any(layout) else (1, 1))

    def test_deepseek_vl_hybrid(self, image: np.ndarray) -> None:
        stock = DeepseekVLHybridImageProcessorPil(size=SQUARE, high_res_size={"height": 128, "width": 128})
        theirs = stock(image, **PLAIN)
        mine = ours(
            image,
            Tiling(
                TilingRule.SQUARE,
                (56, 56),
                background=BACKGROUND,
                min_side=14,
                crop=(128, 128),
                crop_background=BACKGROUND,
                crop_resample=3,
            ),
        )
        assert_near(mine.pixels, theirs["pixel_values"])
        assert mine.crops is not None
        assert_near(mine.crops, theirs["high_res_pixel_values"])

    def test_deepseek_ocr2(self, image: np.ndarray) -> None:
        theirs = DeepseekOcr2ImageProcessorPil(size={"height": 80, "width": 80}, tile_size=64)(image, **PLAIN)
        tiling = Tiling(
            TilingRule.CLOSEST_RATIO, (80, 80), min_tiles=2, max_tiles=6, background=(127,) * 3, crop=(64, 64)
        )
        if round(min(image.shape[:2]) * 80 / max(image.shape)) == 0:
            pytest.skip("the stock processor cannot resize to nothing")
        mine = ours(image, tiling)
        assert_near(mine.pixels, theirs["pixel_values"])
        count = int(theirs["num_local_patches"][0])
        assert mine.grid[0] == count + 1
        if count:
            assert mine.crops is not None
            assert_near(mine.crops, theirs["pixel_values_local"])
            assert mine.grid[1] * mine.grid[2] == count
        else:
            assert mine.crops is None


@pytest.mark.parametrize("size", [*SIZES, (700, 300), (120, 90), (70, 900), (300, 300)])
@pytest.mark.parametrize("most", [6, 12])
def test_moondream(size: tuple[int, int], most: int) -> None:
    image = picture(*size)
    theirs = moondream_crops(Image.fromarray(image), tile=56, most=most, margin=14)
    mine = ours(image, Tiling(TilingRule.OVERLAPPING, (56, 56), max_tiles=most, margin=14), resample=1)
    assert mine.grid[0] == len(theirs) == 1 + mine.grid[1] * mine.grid[2]
    assert_near(mine.pixels, theirs.transpose(0, 3, 1, 2))


def test_an_image_that_is_too_elongated_to_be_cut_out_of_is_refused() -> None:
    with pytest.raises(ValueError, match="2x200000 is too elongated"):
        ours(np.zeros((2, 200_000, 3), np.uint8), Tiling(TilingRule.CENTER_CROP, (336, 336), min_side=336))


@pytest.mark.parametrize("size", [*SIZES, (700, 300), (120, 90)])
def test_original_ovis2(size: tuple[int, int]) -> None:
    image = picture(*size)
    if min(size) * 56 < max(size):
        pytest.skip("the authors' code cannot resize to nothing")
    theirs = np.stack(original_tiles(Image.fromarray(image), 56)).transpose(0, 3, 1, 2)
    mine = ours(image, Tiling(TilingRule.COVERING_PARTS, (56, 56), Overview.FIRST, 1, 9, background=BACKGROUND))
    assert mine.grid[0] == len(theirs)
    blank = np.broadcast_to(np.reshape(BACKGROUND, (1, 3, 1, 1)), theirs.shape)
    assert_near(mine.pixels, np.where(np.isnan(theirs), blank, theirs))


def test_ovis2_layouts_of_random_sizes() -> None:
    rng = np.random.default_rng(3)
    for height, width in rng.integers(1, 3000, (60, 2)).tolist():
        columns, rows = get_min_tile_covering_grid((height, width), 448, 9)
        assert covering_layout((height, width), 448, 9) == (rows, columns), (height, width)


# The stock processors of these two need torchvision; what they plan was worked out by hand from their rules.


@pytest.mark.parametrize(("size", "grid"), [
    ((56, 56), (1, 1, 1)), ((20, 20), (1, 1, 1)), ((57, 57), (5, 2, 2)), ((56, 112), (3, 1, 2)), ((112, 56), (3, 2, 1)),
    ((56, 200), (5, 1, 4)), ((300, 300), (5, 2, 2)), ((60, 100), (5, 2, 2)), ((30, 400), (7, 1, 6)),
])  # fmt: skip
def test_llama4_takes_the_layout_that_scales_least(size: tuple[int, int], grid: tuple[int, int, int]) -> None:
    tiles = ours(picture(*size), Tiling(TilingRule.CANVAS, (56, 56), Overview.LAST, max_tiles=6), resample=2)
    assert tiles.grid == grid
    assert tiles.pixels.shape == (grid[0], 3, 56, 56)


# What the stock processor, which needs torchvision, gave as num_patches and layout:
# Cohere2VisionImageProcessor(size=SQUARE, max_patches=6)([picture(*size)]), transformers 5.23
@pytest.mark.parametrize(("size", "grid"), [
    ((30, 30), (1, 1, 1)), ((64, 40), (3, 2, 1)), ((40, 100), (3, 1, 2)), ((57, 55), (3, 2, 1)), ((200, 90), (7, 3, 2)),
    ((90, 301), (5, 1, 4)), ((113, 224), (7, 2, 3)), ((12, 300), (7, 1, 6)), ((400, 7), (7, 6, 1)),
    ((2, 2), (1, 1, 1)), ((300, 300), (5, 2, 2)), ((480, 640), (7, 2, 3)),
])  # fmt: skip
def test_command_vision_stretches_an_image_over_the_layout_that_scales_least(
    size: tuple[int, int], grid: tuple[int, int, int]
) -> None:
    image = picture(*size)
    tiles = ours(image, Tiling(TilingRule.LEAST_SCALING, (56, 56), Overview.LAST, max_tiles=6))
    assert tiles.grid == grid
    (whole,) = ours(image, Tiling(TilingRule.STRETCH, (56 * grid[1], 56 * grid[2]))).pixels
    assert (tiles.pixels[0] == whole[:, :56, :56]).all()
    assert (tiles.pixels[-1] == ours(image, Tiling(TilingRule.STRETCH, (56, 56))).pixels[0]).all()


def test_llama4_enlarges_to_one_tile_and_pads_at_the_end() -> None:
    image = np.full((28, 112, 3), 200, np.uint8)
    tiles = ours(image, Tiling(TilingRule.CANVAS, (56, 56), Overview.LAST, max_tiles=6), resample=2)
    assert tiles.grid == (3, 1, 2)
    assert (tiles.pixels[:2, :, :28] == 200).all()
    assert (tiles.pixels[:2, :, 28:] == 0).all()
    assert (tiles.pixels[2] == 200).all(), "the last tile shows the whole image, stretched"


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((168, 168), (1, 1, 1)),
        ((100, 150), (1, 1, 1)),
        ((100, 160), (3, 1, 2)),  # elongated: windows of 100, the rest of 60 becomes one more
        ((100, 115), (1, 1, 1)),
        ((224, 224), (5, 2, 2)),
        ((112, 260), (4, 1, 3)),  # the rest of 36 is more than a fifth of 112
        ((300, 224), (7, 3, 2)),
        ((60, 400), (8, 1, 7)),  # very elongated: windows of 60, and a rest of 40
        ((896, 448), (9, 4, 2)),  # 448 by 224 after the bound on the longer side
        ((20, 100), (1, 1, 1)),  # padded to a square of 100
    ],
)
def test_step3_plans_windows(size: tuple[int, int], grid: tuple[int, int, int]) -> None:
    tiling = Tiling(TilingRule.WINDOWS, (168, 168), max_tiles=16, max_side=448, crop=(112, 112))
    tiles = ours(picture(*size), tiling, resample=2)
    assert tiles.grid == grid
    assert tiles.pixels.shape == (1, 3, 168, 168)
    assert (0 if tiles.crops is None else len(tiles.crops)) == grid[0] - 1


def test_frames_are_tiles() -> None:
    clip = np.stack([picture(40, 60) for _ in range(3)])
    tiling = Tiling(TilingRule.STRETCH, (56, 56))
    tiles = prepared.clip(clip, tiled(tiling))
    assert tiles.grid == (3, 1, 1)
    assert_near(tiles.pixels[:1], ours(clip[0], tiling).pixels)
