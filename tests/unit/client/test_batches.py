"""Outputs of Hugging Face processors, split into items, and outputs that are inconsistent."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import BatchFeature
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.deepseek_vl_hybrid.image_processing_pil_deepseek_vl_hybrid import (
    DeepseekVLHybridImageProcessorPil,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.pix2struct.image_processing_pil_pix2struct import Pix2StructImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from client_models import described
from vitwire import InvalidItem, Item
from vitwire._arguments import batch_items

Array = NDArray[Any]
Alone = Callable[[Mapping[str, Any]], tuple[Array, Array | None]]
"""Pixels and crops of the only image of a processor's outputs, by the layout's description."""
SIZES = [(96, 128), (40, 150), (224, 120)]
SMALL = {"height": 56, "width": 56}


def picture(height: int, width: int) -> Image.Image:
    noise = np.random.default_rng(height).integers(0, 255, (height, width, 3))
    return Image.fromarray(noise.astype(np.uint8))


def everything(outputs: Mapping[str, Any]) -> tuple[Array, None]:
    pixels = outputs["pixel_values"]
    return pixels.reshape(len(pixels), -1) if "image_grid_thw" in outputs else pixels, None


def of_pixtral(outputs: Mapping[str, Any]) -> tuple[Array, None]:
    (image,), ((height, width),) = outputs["pixel_values"], outputs["image_sizes"]
    blocks = [image[:, y : y + 14, x : x + 14] for y in range(0, height, 14) for x in range(0, width, 14)]
    return np.stack(blocks).reshape(len(blocks), -1), None


def of_gemma4(outputs: Mapping[str, Any]) -> tuple[Array, None]:
    return outputs["pixel_values"][0][(outputs["image_position_ids"][0] >= 0).all(-1)], None


def of_siglip2(outputs: Mapping[str, Any]) -> tuple[Array, None]:
    return outputs["pixel_values"][0][outputs["pixel_attention_mask"][0] == 1], None


PROCESSORS: dict[str, tuple[Any, Alone]] = {
    "qwen2_vl": (Qwen2VLImageProcessorPil(), everything),
    "paddleocr_vl": (PaddleOCRVLImageProcessorPil(min_pixels=56 * 56), everything),
    "internvl": (GotOcr2ImageProcessorPil(size=SMALL, crop_to_patches=True, max_patches=6), everything),
    "llava_onevision": (
        LlavaOnevisionImageProcessorPil(size=SMALL, image_grid_pinpoints=[[56, 56], [56, 112], [168, 112], [168, 168]]),
        lambda outputs: (outputs["pixel_values"][0], None),
    ),
    "gemma3": (Gemma3ImageProcessorPil(size=SMALL), everything),
    "deepseek_vl": (DeepseekVLImageProcessorPil(size=SMALL), everything),
    "deepseek_vl_hybrid": (
        DeepseekVLHybridImageProcessorPil(size=SMALL, high_res_size={"height": 112, "width": 112}),
        lambda outputs: (outputs["pixel_values"], outputs["high_res_pixel_values"]),
    ),
    "deepseek_ocr2": (
        DeepseekOcr2ImageProcessorPil(size=SMALL, tile_size=42),
        lambda outputs: (outputs["pixel_values"], outputs.get("pixel_values_local")),
    ),
    "pixtral": (PixtralImageProcessorPil(patch_size={"height": 14, "width": 14}), of_pixtral),
    "gemma4": (Gemma4ImageProcessorPil(), of_gemma4),
    "siglip2": (Siglip2ImageProcessorPil(patch_size=14, max_num_patches=64), of_siglip2),
}
ONE_TILE = described(tiling=True)


@pytest.mark.parametrize("kind", ["np", "pt", None])
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_batch_is_split_into_what_each_image_is_alone(name: str, kind: str | None) -> None:
    processor, alone = PROCESSORS[name]
    images = [picture(*size) for size in SIZES]
    items = Item.from_processor(processor(images, return_tensors=kind), ONE_TILE, content_ids=["a", None, "c"])
    assert [item.content_id for item in items] == ["a", None, "c"]
    for item, image in zip(items, images, strict=True):
        pixels, crops = alone(processor([image], return_tensors="np"))
        np.testing.assert_array_equal(item.pixels, pixels)
        assert (item.crops is None) == (crops is None)
        if crops is not None:
            np.testing.assert_array_equal(item.crops, crops)
        assert item.modality == "image"
    if name in ("qwen2_vl", "paddleocr_vl", "pixtral", "gemma4", "siglip2"):
        assert all(item.grid[0] == 1 and np.prod(item.grid) == len(item.pixels) for item in items)
    elif name in ("internvl", "llava_onevision"):
        assert [item.grid for item in items] == [(len(item.pixels), 1, 1) for item in items]
        assert len({item.grid for item in items}) > 1
    else:
        assert [item.grid[0] for item in items] == [
            1 + (len(item.crops) if name == "deepseek_ocr2" and item.crops is not None else 0) for item in items
        ]


# -- tensors as callers have them ------------------------------------------------------------------

GRIDS = [(1, 4, 2), (1, 2, 2), (2, 2, 4)]
ROWS = torch.randn(28, 6, generator=torch.Generator().manual_seed(0))
CUTS = [(0, 8), (8, 12), (12, 28)]


def values(item: Item) -> Array:
    return item.pixels if isinstance(item.pixels, np.ndarray) else item.pixels.float().numpy()


def check_rows(items: Sequence[Item], rows: torch.Tensor = ROWS) -> None:
    assert [item.grid for item in items] == GRIDS
    for item, (start, end) in zip(items, CUTS, strict=True):
        np.testing.assert_array_equal(values(item), rows[start:end].float().numpy())


@pytest.mark.parametrize(
    "grids", [GRIDS, np.array(GRIDS), torch.tensor(GRIDS), list(torch.tensor(GRIDS)), np.array(GRIDS, np.float32)]
)
def test_grids_may_be_lists_arrays_and_tensors(grids: Any) -> None:
    check_rows(batch_items(ROWS, grids))
    check_rows(Item.from_processor({"pixel_values": ROWS, "image_grid_thw": grids}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8], ids=str)
def test_types_of_the_wire_are_views_of_the_batch(dtype: torch.dtype) -> None:
    rows = ROWS.to(dtype)
    items = batch_items(rows, GRIDS)
    check_rows(items, rows)
    assert items[1].pixels.dtype == dtype
    assert items[1].pixels.data_ptr() == rows[8].data_ptr()


@pytest.mark.parametrize(
    "rows",
    [
        ROWS.double(),
        ROWS.double().numpy(),
        ROWS.numpy().astype(np.longdouble),
        ROWS.clone().requires_grad_(),
        ROWS.numpy().astype(">f4"),
        ROWS.repeat_interleave(2, dim=0)[::2],
        np.asfortranarray(ROWS.numpy()),
        [ROWS[start:end] for start, end in CUTS],
        [ROWS[start:end].numpy() for start, end in CUTS],
        [[ROWS[start:end].double()] for start, end in CUTS],
        ROWS.tolist(),
    ],
    ids=["f64", "np f64", "long double", "grad", "big endian", "strided", "fortran", "list", "arrays", "nested", "py"],
)
def test_any_float_tensor_is_taken(rows: Any) -> None:
    items = batch_items(rows, GRIDS)
    check_rows(items)
    assert all(str(item.pixels.dtype).removeprefix("torch.") in ("float32", ">f4") for item in items)


def test_clips_and_images_of_one_processor() -> None:
    outputs = BatchFeature(
        {
            "input_ids": [[1, 2]],
            "pixel_values": ROWS[:12],
            "image_grid_thw": torch.tensor(GRIDS[:2]),
            "pixel_values_videos": ROWS[12:],
            "video_grid_thw": torch.tensor(GRIDS[2:]),
        }
    )
    items = Item.from_processor(outputs, keep_ratio=0.5)
    check_rows(items)
    assert [(item.modality, item.keep_ratio) for item in items] == [("image", 0.0), ("image", 0.0), ("video", 0.5)]
    check_rows(batch_items(outputs))
    (clip,) = batch_items(ROWS[12:], GRIDS[2:], modality="video", keep_ratio=0.5, content_ids=["x"])
    assert (clip.modality, clip.keep_ratio, clip.content_id) == ("video", 0.5, "x")


def test_clips_of_frames() -> None:
    frames = torch.randn(2, 3, 3, 8, 8)
    for items in (
        Item.from_processor({"pixel_values_videos": frames}),
        batch_items(frames, modality="video"),
        batch_items(list(frames), [3, 3], modality="video"),
    ):
        assert [item.grid for item in items] == [(3, 1, 1)] * 2
        np.testing.assert_array_equal(items[1].pixels, frames[1])
    ragged = Item.from_processor({"pixel_values_videos": [frames[0], frames[1, :2]]})
    assert [item.grid for item in ragged] == [(3, 1, 1), (2, 1, 1)]


def test_clips_of_padded_patches() -> None:
    """Gemma 4: frames of all clips, one after the other, each padded."""
    patches = torch.zeros(3, 8, 6)
    patches[:, :4] = torch.randn(3, 4, 6)
    positions = torch.full((3, 8, 2), -1)
    positions[:, :4] = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]])
    outputs = {
        "pixel_values_videos": patches,
        "video_position_ids": positions,
        "num_frames_per_video": torch.tensor([2, 1]),
    }
    items = Item.from_processor(outputs)
    assert [item.grid for item in items] == [(2, 2, 2), (1, 2, 2)]
    np.testing.assert_array_equal(items[0].pixels, patches[:2, :4].reshape(8, 6))
    stacked = {"pixel_values_videos": patches[None, :2], "video_position_ids": positions[None, :2]}
    np.testing.assert_array_equal(Item.from_processor(stacked)[0].pixels, items[0].pixels)
    outputs["num_frames_per_video"] = torch.tensor([2, 2])
    with pytest.raises(InvalidItem, match="num_frames_per_video"):
        Item.from_processor(outputs)


TILES = torch.randn(5, 3, 8, 8)


def test_tiles() -> None:
    padded = torch.zeros(2, 3, 3, 8, 8)
    padded[0], padded[1, :2] = TILES[:3], TILES[3:]
    for items in (
        batch_items(TILES, [3, 2]),
        batch_items(TILES, torch.tensor([3, 2])),
        batch_items(list(TILES), [3, 2]),
        batch_items([TILES[:3], TILES[3:]], [3, 2]),
        batch_items(padded, [3, 2]),
        batch_items(padded),
        batch_items(TILES, [(3, 1, 1), (2, 1, 1)]),
        Item.from_processor({"pixel_values": TILES}, grid_thw=[3, 2]),
        Item.from_processor({"pixel_values": TILES, "num_patches": np.array([3, 2])}),
    ):
        assert [item.grid for item in items] == [(3, 1, 1), (2, 1, 1)]
        np.testing.assert_array_equal(np.concatenate([values(item) for item in items]), TILES)
    layouts = batch_items(TILES, [(4, 3, 1), (1, 1, 1)])
    assert [item.grid for item in layouts] == [(4, 3, 1), (1, 1, 1)]
    ratios = {"pixel_values": torch.cat([TILES, TILES]), "aspect_ratios": torch.tensor([[2, 4], [1, 1]])}
    assert [item.grid for item in Item.from_processor(ratios)] == [(9, 2, 4), (1, 1, 1)]
    merged = {"pixel_values": [TILES[:3], TILES[3:]], "tilings": [(1, 2), (1, 1)]}
    assert [item.grid for item in Item.from_processor(merged)] == [(3, 1, 2), (2, 1, 1)]
    cut = {"pixel_values": ratios["pixel_values"], "grids": ratios["aspect_ratios"]}
    assert [item.grid for item in Item.from_processor(cut)] == [(9, 2, 4), (1, 1, 1)]


def test_crops() -> None:
    views, crops = TILES[:3], torch.randn(6, 3, 4, 4)
    for grids in ([4, 0, 2], [(5, 2, 2), (1, 1, 1), (3, 1, 2)]):
        items = batch_items(views, grids, crops=crops)
        assert [item.grid[0] for item in items] == [5, 1, 3]
        assert items[1].crops is None
        np.testing.assert_array_equal(items[2].crops, crops[4:])
        np.testing.assert_array_equal(items[2].pixels, views[2:])
    assert items[0].grid == (5, 2, 2)
    pairs = batch_items(views, crops=crops[:3])
    assert [item.grid for item in pairs] == [(1, 1, 1)] * 3
    np.testing.assert_array_equal(pairs[1].crops, crops[1:2])


@pytest.mark.parametrize("kind", ["np", "pt"])
def test_each_slice_of_a_strip_is_an_item(kind: str) -> None:
    processor = MiniCPMV4_6ImageProcessorPil(max_slice_nums=4, patch_size=14, scale_resolution=112)
    outputs = processor([picture(224, 120)], return_tensors=kind)
    items = Item.from_processor(outputs)
    assert [item.grid for item in items] == [(1, int(h), int(w)) for h, w in outputs["target_sizes"]]
    assert len(items) > 1, "the overview and slices of it"
    strip = np.asarray(outputs["pixel_values"])[0]
    patches = [strip[:, :, at : at + 14].reshape(-1) for at in range(0, strip.shape[-1], 14)]
    np.testing.assert_array_equal(np.concatenate([np.asarray(item.pixels) for item in items]), np.stack(patches))
    clip = Item.from_processor(
        {"pixel_values_videos": outputs["pixel_values"], "target_sizes_videos": outputs["target_sizes"]}
    )
    assert [item.modality for item in clip] == ["video"] * len(items)
    with pytest.raises(InvalidItem, match="expected one strip of patches"):
        Item.from_processor({**outputs, "pixel_values": [strip, strip]})


def test_an_empty_batch_has_no_items() -> None:
    for pixels, grids in ((torch.empty(0, 6), []), ([], []), (np.empty((0, 3, 8, 8)), np.empty((0, 3), int))):
        assert batch_items(pixels, grids) == []
    assert Item.from_processor({"pixel_values": [], "image_grid_thw": []}) == []


# -- what is wrong ---------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "too few rows": (lambda: batch_items(ROWS[:20], GRIDS), "grid_thw[2]"),
    "too many rows": (lambda: batch_items(ROWS, GRIDS[:2]), "pixel_values"),
    "processor": (
        lambda: Item.from_processor({"pixel_values": ROWS[:9], "image_grid_thw": GRIDS}),
        "image_grid_thw[1]",
    ),
    "no grids": (lambda: batch_items(ROWS, []), "pixel_values"),
    "zero": (lambda: batch_items(ROWS, [(1, 4, 2), (1, 0, 2)]), "grid_thw[1]"),
    "mixed": (lambda: batch_items(ROWS, [(1, 4, 2), 4]), "grid_thw[1]"),
    "a number": (lambda: batch_items(ROWS, 28), "grid_thw"),
    "flat grid": (lambda: batch_items(ROWS, (1, 4, 7)), "grid_thw"),
    "missing": (lambda: batch_items(ROWS), "grid_thw"),
    "short in a list": (lambda: batch_items([ROWS[:8], ROWS[8:11], ROWS[12:]], GRIDS), "grid_thw[1]"),
    "long in a list": (lambda: batch_items([ROWS[:8], ROWS[8:14], ROWS[12:]], GRIDS), "pixel_values[1]"),
    "a list too short": (lambda: batch_items([ROWS[:8], ROWS[8:12]], GRIDS), "pixel_values"),
    "tiles": (lambda: batch_items(TILES, [3, 3]), "grid_thw[1]"),
    "fewer tiles": (lambda: batch_items(TILES, [3, 1]), "pixel_values"),
    "padded tiles": (lambda: batch_items(torch.zeros(2, 3, 3, 8, 8), [3, 4]), "grid_thw[1]"),
    "no padding": (lambda: batch_items(torch.ones(2, 3, 3, 8, 8), [3, 2]), "pixel_values[1]"),
    "no numbers of tiles": (lambda: Item.from_processor({"pixel_values": TILES}), "grid_thw"),
    "no patch size": (
        lambda: Item.from_processor({"pixel_values": TILES, "image_sizes": [(8, 8)] * 5}),
        "pixel_values",
    ),
    "crops": (lambda: batch_items(TILES, [1, 1, 1, 1, 1], crops=TILES[:4]), "grid_thw[4]"),
    "crops left": (lambda: batch_items(TILES[:1], [3], crops=TILES), "crops"),
    "crops without pictures": (lambda: batch_items(TILES[:1], [2, 3], crops=TILES), "pixel_values"),
    "flat crops": (lambda: batch_items(TILES[:1], [3], crops=ROWS), "crops"),
    "crops twice": (lambda: batch_items({"pixel_values": TILES}, crops=TILES), "crops"),
    "ids": (lambda: batch_items(ROWS, GRIDS, content_ids=["a"]), "content_ids"),
    "one id": (lambda: batch_items(ROWS, GRIDS, content_ids="abc"), "content_ids"),
    "modality": (lambda: batch_items(ROWS, GRIDS, modality="audio"), "modality"),
    "ratio": (lambda: batch_items(ROWS, GRIDS, keep_ratio=2.0), "keep_ratio"),
    "merged otherwise": (
        lambda: Item.from_processor({"pixel_values": ROWS, "image_grid_thw": GRIDS, "image_merge_sizes": [1, 2, 1]}),
        "image_merge_sizes",
    ),
    "the fine path": (
        lambda: Item.from_processor({"pixel_values": TILES[None], "tile_fine_mask": [True]}),
        "tile_fine_mask",
    ),
    "nothing": (lambda: Item.from_processor({}), "outputs"),
    "text only": (lambda: Item.from_processor({"input_ids": [1]}), "outputs"),
    "no outputs": (lambda: Item.from_processor([ROWS]), "outputs"),
    "mixed ranks": (lambda: batch_items([ROWS[:8], ROWS[8:12, 0]], GRIDS[:2]), "pixel_values"),
}
ODD_GRIDS: list[Any] = [
    (1, -4, 2), (1, 4, 2.5), (1, 4, float("inf")), (1, 4, float("nan")), True, "1x4x2", (1, 4, 2, 1), (2**31,) * 3,
]  # fmt: skip
ODD_PIXELS: list[Any] = [
    ROWS.flatten(), ROWS.reshape(28, 1, 1, 1, 1, 6), torch.tensor(1.0), ROWS.long(), ROWS.to(torch.complex64),
    ROWS.numpy().astype(np.complex64), ROWS.to("meta"), ROWS.to_sparse(), None, b"abc", [[1.0, 2.0], [1.0]],
]  # fmt: skip
for at, grid in enumerate(ODD_GRIDS):
    WRONG[f"grid {at}"] = (partial(batch_items, ROWS, [grid]), "grid_thw[0]")
for at, pixels in enumerate(ODD_PIXELS):
    WRONG[f"pixels {at}"] = (partial(batch_items, pixels, GRIDS), "pixel_values")


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    call, field = WRONG[name]
    with pytest.raises(InvalidItem) as raised:
        call()
    assert [each.field for each in raised.value.violations] == [field]
    assert str(raised.value).startswith(f"{field}: ")


def test_the_error_of_missing_sizes_says_what_to_pass() -> None:
    with pytest.raises(InvalidItem, match=r"pass image_grid_thw$"):
        batch_items(ROWS)
    with pytest.raises(InvalidItem, match=r"pass the number of tiles of each image$"):
        batch_items(np.zeros((3, 3, 8, 8), np.float32))


def layouts(**changes: object) -> dict[str, object]:
    """Outputs of Llama 3.2 Vision's processor: one prompt of two images of up to four tiles."""
    return {
        "pixel_values": torch.randn(1, 2, 4, 3, 4, 4),
        "aspect_ratio_ids": torch.tensor([[2, 6]]),
        "aspect_ratio_mask": torch.ones(1, 2, 4),
        **changes,
    }


def test_layouts_follow_from_their_numbers() -> None:
    outputs = layouts()
    items = Item.from_processor(outputs)
    assert [item.grid for item in items] == [(2, 1, 2), (4, 2, 2)]
    np.testing.assert_array_equal(values(items[0]), np.asarray(outputs["pixel_values"])[0, 0, :2])
    (alone,) = Item.from_processor(layouts(aspect_ratio_ids=torch.tensor([[0, 1]])))
    assert alone.grid == (1, 1, 1)


def canvases(**changes: object) -> dict[str, object]:
    """Outputs of Phi-4's processor: an image of 3 x 6 patches on a canvas of 1 x 2 crops of 4 x 4 patches."""
    masks = torch.ones(1, 4, 4, 4)
    masks[0, 1:3, 3:] = 0
    masks[0, 2, :, 2:] = 0
    return {
        "image_pixel_values": torch.randn(1, 4, 3, 8, 8),
        "image_sizes": torch.tensor([[8, 16]]),
        "image_attention_mask": masks,
        **changes,
    }


def test_masks_of_crops_give_the_grid() -> None:
    (item,) = Item.from_processor(canvases())
    assert item.grid == (1, 3, 6)
    assert values(item).shape == (3, 3, 8, 8)
    whole = {"pixel_values": torch.randn(1, 4, 3, 8, 8), "image_sizes": torch.tensor([[8, 16]])}
    (item,) = Item.from_processor(whole, replace(ONE_TILE, model_type="phi3_v", patch_size=2))
    assert item.grid == (1, 4, 8)


MASK = torch.zeros(1, 4, 4, 4)
HOLE = torch.ones(1, 4, 4, 4)
HOLE[0, 1, 1, 1] = 0


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (layouts(aspect_ratio_ids=torch.tensor([[2, 9]])), r"aspect_ratio_ids\[0\]\[1\]: expected 0 to 8, got 9"),
        (layouts(aspect_ratio_ids=torch.tensor([[2]])), r"aspect_ratio_ids\[0\]: expected one for each of 2 images"),
        (layouts(pixel_values=TILES), "aspect_ratio_ids: expected one for each image"),
        (canvases(image_attention_mask=MASK), "image_attention_mask: expected background at the bottom"),
        (canvases(image_attention_mask=HOLE), "image_attention_mask: expected background at the bottom"),
        (canvases(image_sizes=torch.tensor([[16, 32]])), "image_attention_mask: expected masks of 2 x 4 crops"),
        (canvases(image_sizes=torch.tensor([[8, 16]] * 2)), "image_attention_mask: expected one entry"),
        (canvases(image_pixel_values=TILES), r"image_pixel_values: expected .* got the shape \(5, 3, 8, 8\)"),
        (
            {"pixel_values": TILES, "pixel_mask": torch.ones(len(TILES), 4, 4)},
            "pixel_mask: counts pixels: pass the model",
        ),
    ],
)
def test_layouts_that_contradict_the_pixels_are_refused(outputs: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidItem, match=message):
        Item.from_processor(outputs)


def test_flattened_patches_have_their_places() -> None:
    processor = Pix2StructImageProcessorPil(patch_size={"height": 14, "width": 14}, max_patches=40)
    outputs = processor([np.full((60, 90, 3), 7, np.uint8), np.zeros((70, 30, 3), np.uint8)], return_tensors="pt")
    items = Item.from_processor(dict(outputs))
    assert [item.grid for item in items] == [(1, 5, 7), (1, 9, 4)]
    np.testing.assert_array_equal(values(items[0]), np.asarray(outputs["flattened_patches"])[0, :35, 2:])
    with pytest.raises(InvalidItem, match="flattened_patches: expected rows and columns from 1"):
        Item.from_processor({"flattened_patches": torch.zeros(1, 4, 5)})
