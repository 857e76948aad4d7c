"""Tiles and raster patches that a client prepares, by what GetModel says, against the model's own processor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.deepseek_vl_hybrid.image_processing_pil_deepseek_vl_hybrid import (
    DeepseekVLHybridImageProcessorPil,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.granite_docling.image_processing_pil_granite_docling import GraniteDoclingImageProcessorPil
from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import HunYuanVLImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from broken import edit
from checkpoints import Checkpoints, sampled
from clear_files import faded
from client_models import client_model
from prepared import image_items, of_images, photograph
from published_processors import deepseek_vl2_tiles, eagle_tiles, h2ovl_tiles, moondream_crops
from vitwire import InvalidItem, Item
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.towers.checkpoints.checkpoint import open_checkpoint
from vitwire_server.towers.files import CheckpointError

Array = NDArray[np.float64]
Stock = Callable[[Path, Image.Image], tuple[Array, Array | None]]
SIZES = [(480, 640), (33, 250), (60, 24), (700, 300), (112, 112)]


def tiles(processor: Any, crops: str | None = None, first: bool = False, **options: Any) -> Stock:
    """The processor's `pixel_values`, and its crops, if it makes any of this image."""

    def run(folder: Path, image: Image.Image) -> tuple[Array, Array | None]:
        stock = processor.from_pretrained(folder)([image], return_tensors="np", **options)
        pixels = stock["pixel_values"][0] if first else stock["pixel_values"]
        second = stock.get(crops) if crops else None
        return np.asarray(pixels, np.float64), None if second is None else np.asarray(second, np.float64)

    return run


def msac(folder: Path, image: Image.Image) -> tuple[Array, None]:
    settings = json.loads((folder / "config.json").read_text())
    tiles = h2ovl_tiles(image, settings["force_image_size"], settings["max_dynamic_patch"]) / 255
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    return ((tiles - mean) / std).transpose(0, 3, 1, 2), None


def deepseek_vl2(folder: Path, image: Image.Image) -> tuple[Array, None]:
    sides = json.loads((folder / "processor_config.json").read_text())["candidate_resolutions"]
    return (deepseek_vl2_tiles(image, sides, 127).transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5, None


def moondream(_: Path, image: Image.Image) -> tuple[Array, None]:
    crops = moondream_crops(image, tile=56, most=6, margin=14).transpose(0, 3, 1, 2)
    return (crops / 255 - 0.5) / 0.5, None


def eagle(folder: Path, image: Image.Image) -> tuple[Array, None]:
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    tiles = eagle_tiles(image, settings["size"]["height"], settings["max_dynamic_tiles"])
    return (tiles.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5, None


def pixtral(factor: int) -> Stock:
    """Its image cut into patches, row by row."""

    def run(folder: Path, image: Image.Image) -> tuple[Array, None]:
        processor = PixtralImageProcessorPil.from_pretrained(folder, patch_size={"height": factor, "width": factor})
        whole = np.asarray(processor([image], return_tensors="np")["pixel_values"][0], np.float64)
        channels, height, width = whole.shape
        patches = whole.reshape(channels, height // 14, 14, width // 14, 14).transpose(1, 3, 0, 2, 4)
        return patches.reshape(-1, channels * 14 * 14), None

    return run


def mllama(folder: Path, image: Image.Image) -> tuple[Array, None]:
    stock = MllamaImageProcessorPil.from_pretrained(folder)([image], return_tensors="np")
    return stock["pixel_values"][0, 0, : stock["num_tiles"][0][0]], None


def siglip2(folder: Path, image: Image.Image) -> tuple[Array, None]:
    stock = Siglip2ImageProcessorPil.from_pretrained(folder)([image], return_tensors="np")
    return stock["pixel_values"][0][stock["pixel_attention_mask"][0] == 1], None


def phi4_siglip(folder: Path, image: Image.Image) -> tuple[Array, None]:
    """SigLIP 2's processor, asked for the image's own patches within the bounds of config.json."""
    bounds = json.loads((folder / "config.json").read_text())
    own = max((image.width // 16) * (image.height // 16), bounds["min_num_patches"])
    stock = Siglip2ImageProcessorPil(max_num_patches=min(own, bounds["max_num_patches"]))([image], return_tensors="np")
    return stock["pixel_values"][0][stock["pixel_attention_mask"][0] == 1], None


def gemma4(folder: Path, image: Image.Image) -> tuple[Array, None]:
    stock = Gemma4ImageProcessorPil.from_pretrained(folder)([image], return_tensors="np")
    return stock["pixel_values"][0][(stock["image_position_ids"][0] >= 0).all(-1)], None


ORIGINAL = {"size": {"height": 112, "width": 112}, "crop_to_patches": True, "max_patches": 6}
STOCK: dict[str, Stock] = {
    **dict.fromkeys(("internvl", "qianfan_ocr", "got_ocr2"), tiles(GotOcr2ImageProcessorPil)),
    **dict.fromkeys(("internvl_chat", "NVLM_D", "skywork_chat"), tiles(GotOcr2ImageProcessorPil, **ORIGINAL)),
    "h2ovl_chat": msac,
    "llava": tiles(LlavaImageProcessorPil),
    **dict.fromkeys(("llava-siglip", "paligemma", "colpali"), tiles(SiglipImageProcessorPil)),
    **dict.fromkeys(
        ("llava_next-siglip", "llava_next_video", "llava_next"), tiles(LlavaNextImageProcessorPil, first=True)
    ),
    "deepseek_vl_v2": deepseek_vl2,
    "eagle_2_5_vl": eagle,
    "moondream3": moondream,
    "llava_onevision": tiles(LlavaOnevisionImageProcessorPil, first=True),
    "aya_vision": tiles(GotOcr2ImageProcessorPil, crop_to_patches=True),
    "janus": tiles(JanusImageProcessorPil),
    **dict.fromkeys(("vipllava", "florence2"), tiles(CLIPImageProcessorPil)),
    **dict.fromkeys(("gemma3", "shieldgemma2", "t5gemma2"), tiles(Gemma3ImageProcessorPil)),
    "deepseek_vl": tiles(DeepseekVLImageProcessorPil),
    "deepseek_vl_hybrid": tiles(DeepseekVLHybridImageProcessorPil, "high_res_pixel_values"),
    **dict.fromkeys(
        ("deepseek_ocr2", "unlimited_ocr", "deepseek_vl_v2-deeplip_b_l"),
        tiles(DeepseekOcr2ImageProcessorPil, "pixel_values_local"),
    ),
    "unlimited-ocr": tiles(DeepseekOcr2ImageProcessorPil, "pixel_values_local", max_patches=32),
    "granite_docling": tiles(GraniteDoclingImageProcessorPil, first=True),
    **dict.fromkeys(("idefics3", "modernvbert"), tiles(Idefics3ImageProcessorPil, first=True)),
    "smolvlm": tiles(SmolVLMImageProcessorPil, first=True),
    "aria": tiles(AriaImageProcessorPil),
    "mllama": mllama,
    "ovis2": tiles(Ovis2ImageProcessorPil),
    "llava-pixtral": pixtral(14),
    **dict.fromkeys(("mistral3", "mistral_large4", "lighton_ocr"), pixtral(28)),
    "phi4-siglip": phi4_siglip,
    "siglip2": siglip2,
    **dict.fromkeys(("gemma4", "diffusion_gemma", "embedding_gemma2"), gemma4),
    **dict.fromkeys(("hunyuan_vl", "hy_v4_vl"), tiles(HunYuanVLImageProcessorPil)),
}
"""Unlimited-OCR's own processor, which needs torchvision, cuts and pads as DeepSeek-OCR-2's does.

Those of llama4, cohere2_vision and step3p7 need torchvision too: see tests/unit/server/preparing/test_tiles.py.
"""


@pytest.mark.parametrize("model_type", sampled(STOCK))
def test_images_are_prepared_as_the_processor_does(model_type: str, checkpoints: Checkpoints) -> None:
    folder = checkpoints(model_type)
    recipe = of_images(folder)
    settings = recipe.settings
    second = (settings.mean, settings.std)
    if model_type == "deepseek_vl_hybrid":  # the server's own
        second = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    for size in SIZES:
        image = photograph(*size)
        pixels, crops = STOCK[model_type](folder, image)
        (item,) = image_items([image], recipe)
        for own, theirs, (mean, std) in (
            (item.pixels, pixels, (settings.mean, settings.std)),
            (item.crops, crops, second),
        ):
            assert (own is None) == (theirs is None), size
            if isinstance(own, np.ndarray) and theirs is not None:
                assert own.shape == theirs.shape, size
                assert np.abs(normalised(own, recipe, mean, std) - theirs).max() < 2 / 255 / min(std), size


@pytest.mark.parametrize("step", ["do_normalize", "do_rescale"])
@pytest.mark.parametrize("model_type", ["llava_next", "mllama", "siglip2", "deepseek_vl_hybrid"])
def test_a_step_that_the_processor_leaves_out_is_left_out(model_type: str, step: str, copied: Checkpoints) -> None:
    folder = copied(model_type)
    edit("preprocessor_config.json", **{step: False})(folder)
    recipe, image = of_images(folder), photograph(70, 90)
    settings = recipe.settings
    pixels, _ = STOCK[model_type](folder, image)
    (item,) = image_items([image], recipe)
    error = np.abs(normalised(item.pixels, recipe, settings.mean, settings.std) - pixels).max()
    assert error < 2 * settings.rescale_factor / min(settings.std)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("llava_next", {"size": {"shortest_edge": 112}}, "size is 112, but must be the tower's image_size, 56"),
        ("mllama", {"size": {"height": 28, "width": 28}}, "size is 28, but must be"),
        ("ovis2", {"size": {"height": 112, "width": 56}}, "is not square"),
        ("got_ocr2", {"size": {"height": 56, "width": 56}}, "size is 56, but must be"),
        ("llava", {"do_resize": False}, "unsupported do_resize: false"),
        ("mllama", {"max_image_tiles": None}, "max_image_tiles is None, but must be a number"),
        ("florence2", {"resample": None}, "resample is None, but must be a number"),
        ("aria", {"image_mean": ["x", 0, 0]}, "image_mean is 'x', but must be a number"),
        ("idefics3", {"size": 56}, "size.longest_edge is None"),
    ],
)
def test_a_setting_that_is_not_served_is_named(
    model_type: str, changes: dict[str, Any], message: str, copied: Checkpoints
) -> None:
    folder = copied(model_type)
    edit("preprocessor_config.json", **changes)(folder)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(folder)).preprocessing()


AUTHORS = ("deepseek_vl_v2", "eagle_2_5_vl", "h2ovl_chat", "moondream3", "phi4-siglip")
"""Their authors' processors are written down for pictures in RGB, which vLLM's reader makes on white."""


@pytest.mark.parametrize("model_type", sampled(STOCK))
def test_a_picture_with_alpha_is_what_the_processor_makes_of_it(
    model_type: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder, clear, path = checkpoints(model_type), faded(), tmp_path / "clear.png"
    clear.save(path)
    white = Image.new("RGB", clear.size, "white")
    white.paste(clear, mask=clear)
    recipe = of_images(folder)
    pixels, _ = STOCK[model_type](folder, white if model_type in AUTHORS else clear)
    of_file, in_memory = image_items([path, clear], recipe)
    assert np.array_equal(of_file.pixels, in_memory.pixels)
    error = np.abs(normalised(of_file.pixels, recipe, recipe.settings.mean, recipe.settings.std) - pixels).max()
    assert error < 2 / 255 / min(recipe.settings.std)


def converts(folder: Path, said: bool | None) -> None:
    """Have the processor's file say whether images are converted to RGB, or not say it."""
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    settings.pop("do_convert_rgb")
    path.write_text(json.dumps(settings if said is None else {**settings, "do_convert_rgb": said}))


UNCONVERTED = ("siglip2", "janus", "deepseek_vl", "deepseek_vl_hybrid")
"""Their processors convert nothing to RGB unless their files say so."""


@pytest.mark.filterwarnings("ignore")  # of files that `load_image` leaves open
@pytest.mark.parametrize("said", [True, False, None], ids=["converted", "not", "unsaid"])
@pytest.mark.parametrize("model_type", [*UNCONVERTED, "gemma3"])
def test_a_transparent_colour_is_what_the_processor_makes_of_it(
    model_type: str, said: bool | None, tmp_path: Path, copied: Checkpoints
) -> None:
    folder = copied(model_type)
    converts(folder, said)
    flat = photograph(40, 60).quantize(4)
    files = [tmp_path / name for name in ("palette.png", "keyed.gif", "keyed.png")]
    for name, image in zip(files, (flat, flat, flat.convert("RGB")), strict=True):
        image.save(name, transparency=image.getpixel((0, 0)))
    recipe = of_images(folder)
    (plain,) = image_items([flat.convert("RGB")], recipe)
    on_white = []
    for source in files:
        loaded = load_image(str(source))
        theirs, _ = STOCK[model_type](folder, loaded)
        for own in (source, loaded):
            (item,) = image_items([own], recipe)
            pixels = normalised(item.pixels, recipe, recipe.settings.mean, recipe.settings.std)
            assert np.abs(pixels - theirs).max() < 2 / 255 / min(recipe.settings.std)
        on_white.append(not np.array_equal(item.pixels, plain.pixels))
    assert any(on_white) is (said if said is not None else model_type not in UNCONVERTED)


@pytest.mark.parametrize("said", [True, False, None], ids=["converted", "not", "unsaid"])
@pytest.mark.parametrize("model_type", [*UNCONVERTED, "gemma3"])
def test_alpha_is_dropped_if_the_processor_converts_nothing(
    model_type: str, said: bool | None, tmp_path: Path, copied: Checkpoints
) -> None:
    """transformers' processors take RGB alone then, which its `load_image` makes of files by dropping alpha."""
    folder = copied(model_type)
    converts(folder, said)
    clear, path = faded(), tmp_path / "clear.png"
    clear.save(path)
    recipe = of_images(folder)
    items = image_items([path, clear], recipe)
    said = model_type not in UNCONVERTED if said is None else said
    if not said:
        with pytest.raises(ValueError, match="4 elements"):
            STOCK[model_type](folder, clear)
    theirs, _ = STOCK[model_type](folder, clear if said else load_image(str(path)))
    for item in items:
        pixels = normalised(item.pixels, recipe, recipe.settings.mean, recipe.settings.std)
        assert np.abs(pixels - theirs).max() < 2 / 255 / min(recipe.settings.std)


def normalised(own: Any, recipe: Recipe, mean: tuple[float, ...], std: tuple[float, ...]) -> Array:
    form = (1, -1, 1) if not recipe.channels_last else (1, 1, -1)
    shaped = own.reshape(len(own), *((-1, 3) if recipe.channels_last else (3, -1))) * recipe.settings.rescale_factor
    floats: Array = (shaped - np.reshape(mean, form)) / np.reshape(std, form)
    return floats.reshape(own.shape)


@pytest.mark.parametrize("model_type", ["llava_next", "llava_next_video"])
def test_sizes_of_images_say_the_layouts_of_their_tiles(model_type: str, checkpoints: Checkpoints) -> None:
    """On LLaVA-NeXT-Video they must: tiles without a layout are frames of a clip."""
    folder, images = checkpoints(model_type), [photograph(*size) for size in ((480, 640), (60, 250), (300, 70))]
    model = client_model(folder)
    outputs = LlavaNextImageProcessorPil.from_pretrained(folder)(images, return_tensors="np")
    found = Item.from_processor(dict(outputs), model)
    assert [item.grid for item in found] == [item.grid for item in image_items(images, of_images(folder))]
    assert [len(cast("Array", item.pixels)) for item in found] == [item.grid[0] for item in found]
    with pytest.raises(InvalidItem, match=r"image_sizes: expected pairs \(height, width\)"):
        Item.from_processor({**outputs, "image_sizes": [1, 2, 3]}, model)
