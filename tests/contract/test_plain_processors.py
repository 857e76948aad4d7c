"""Tiles of vision transformers that are served alone, as a client prepares them, against the model's own processor."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional
from transformers import AutoModel
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.chinese_clip.image_processing_pil_chinese_clip import ChineseCLIPImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from broken import Break, config, edit, load, refused
from checkpoints import Checkpoints
from prepared import clip_items, image_items, of_clips, of_images, photograph
from reference import TOLERANCE, error
from rigs import Rig
from vitwire_server.core.grids import Grid
from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.files import CheckpointError

PROCESSOR = "preprocessor_config.json"
SIZES = [(480, 640), (33, 250), (60, 24), (700, 301), (56, 56), (64, 64), (65, 99), (1, 5)]
STOCK: dict[str, Any] = {
    **dict.fromkeys(("clip", "aimv2", "intern_vit_6b"), CLIPImageProcessorPil),
    "chinese_clip": ChineseCLIPImageProcessorPil,
    "dinov2": BitImageProcessorPil,
    "deit": DeiTImageProcessorPil,
    "siglip": SiglipImageProcessorPil,
    "vit": ViTImageProcessorPil,
}


RAW = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}


@pytest.mark.parametrize("model_type", STOCK)
def test_pixels_are_those_of_the_processor(model_type: str, checkpoints: Checkpoints) -> None:
    folder = checkpoints(model_type)
    processor, recipe = STOCK[model_type].from_pretrained(folder), of_images(folder)
    settings = recipe.settings
    assert (settings.mean, settings.std) == (tuple(processor.image_mean), tuple(processor.image_std))
    for size in SIZES:
        image = photograph(*size)
        stock = processor([image], **RAW)["pixel_values"]
        (item,), (clip,) = image_items([image], recipe), clip_items([[image, image]], of_clips(folder))
        np.testing.assert_array_equal(item.pixels, stock, err_msg=str(size))
        np.testing.assert_array_equal(clip.pixels, np.concatenate([stock, stock]))
        assert (item.grid, clip.grid) == ((1, 1, 1), (2, 1, 1))


@pytest.mark.parametrize(("model_type", "rounds", "least"), [("dinov3_vit", False, 1.5), ("tipsv2", True, 1.01)])
def test_pixels_differ_from_those_of_torchvision_by_rounding_alone(
    model_type: str, rounds: bool, least: float, checkpoints: Checkpoints
) -> None:
    """Their processors need torchvision, whose resize calls `functional.interpolate`.

    DINOv3's rescales before it resizes, and emits values between those of 8 bits; Pillow rounds twice. With torchvision
    0.29, DINOv3ViTImageProcessor(size=...) of these photographs is within 3e-7 of it. TIPSv2's resizes 8 bits, and
    rounds elsewhere than Pillow: by one at most.
    """
    recipe = of_images(checkpoints(model_type))
    assert not rounds or (recipe.settings.mean, recipe.settings.std) == ((0.0,) * 3, (1.0,) * 3)
    for size in SIZES:
        image = photograph(*size)
        whole = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        given = whole if rounds else whole.float()
        stock = functional.interpolate(given, (56, 56), mode="bilinear", antialias=True, align_corners=False)
        (item,) = image_items([image], recipe)
        assert isinstance(item.pixels, np.ndarray)
        assert np.abs(item.pixels.astype(float) - stock.numpy()).max() < least, size


def test_an_image_that_would_grow_beyond_bounds_is_refused(checkpoints: Checkpoints) -> None:
    recipe = of_images(checkpoints("clip"))
    with pytest.raises(ValueError, match="1x30000 is too elongated: resized, it would have "):
        image_items([Image.new("RGB", (30000, 1))], recipe)


@pytest.mark.parametrize(
    ("model_type", "harm", "message"),
    [
        (
            "clip",
            edit(PROCESSOR, crop_size=112),
            "preprocessor_config.json: the processor's settings cannot be used: crop_size .112, 112. is larger",
        ),
        (
            "clip",
            edit(PROCESSOR, crop_size=42),
            "image_size is 56, but preprocessor_config.json makes tiles of .42, 42.",
        ),
        ("clip", edit(PROCESSOR, do_center_crop=False), "crop_size None does not make one tile"),
        ("clip", edit(PROCESSOR, do_center_crop=None), "crop_size None does not make one tile"),
        ("deit", edit(PROCESSOR, size={"height": 64, "width": 60}), "size .* does not make one tile"),
        ("deit", edit(PROCESSOR, size={"height": 48, "width": 48}), "crop_size .56, 56. is larger than size"),
        ("clip", edit(PROCESSOR, do_resize=False), "unsupported do_resize: false"),
        (
            "clip",
            edit(PROCESSOR, image_processor_type="ConvNextImageProcessor"),
            "unsupported image_processor_type 'ConvNextImageProcessor'",
        ),
        ("siglip", edit(PROCESSOR, size={"height": 56, "width": 42}), "tiles of .56, 42."),
        ("dinov2", edit(PROCESSOR, crop_size=12), "tiles of .12, 12., which hold no patch of patch_size"),
        ("dinov2", edit(PROCESSOR, crop_size={"height": 0, "width": 56}), "crop_size is .*, but its sides must be"),
        ("clip", edit(PROCESSOR, crop_size={"shortest_edge": 56}), "crop_size.height is None, but must be a number"),
        ("clip", edit(PROCESSOR, size={"shortest_edge": None}), "size.shortest_edge is None, but must be a number"),
        ("siglip", edit(PROCESSOR, size={"height": "x", "width": 56}), "size.height is 'x', but must be a number"),
        ("vit", edit(PROCESSOR, image_std=[0.5, 0.0, 0.5]), "must be finite"),
    ],
)
def test_what_does_not_make_one_tile_is_named(model_type: str, harm: Break, message: str, copied: Checkpoints) -> None:
    refused(copied(model_type), harm, message)


@pytest.mark.parametrize("named", [5, [None], None, []])
def test_a_class_that_is_not_named_has_no_projection(named: object, copied: Checkpoints) -> None:
    folder = copied("clip_vision_model")
    width = load(folder, Pooling.CLS).tower.geometry.width
    config(architectures=named)(folder)
    assert load(folder, Pooling.CLS).tower.geometry.width > width, "the tower's own"


def test_published_files_of_older_releases(copied: Checkpoints) -> None:
    """Sizes as plain numbers, names of feature extractors, nulls, or no file at all."""
    folder = copied("clip")
    wanted = of_images(folder)
    old = {"feature_extractor_type": "CLIPFeatureExtractor", "image_processor_type": None, "size": 64, "crop_size": 56}
    edit(PROCESSOR, **old, do_convert_rgb=None, resample=None)(folder)
    assert of_images(folder) == wanted
    (folder / PROCESSOR).unlink()
    with pytest.raises(CheckpointError, match=r"copy holds no preprocessor_config.json"):
        load(folder)


@pytest.mark.parametrize("model_type", ["clip", "siglip", "vit"])
def test_a_step_that_is_null_is_not_done(model_type: str, copied: Checkpoints) -> None:
    """As by the processor, which takes null as false."""
    folder = copied(model_type)
    edit(PROCESSOR, do_normalize=None)(folder)
    image, recipe = photograph(480, 640), of_images(folder)
    stock = STOCK[model_type].from_pretrained(folder)([image], return_tensors="np")["pixel_values"]
    settings = recipe.settings
    (item,) = image_items([image], recipe)
    assert isinstance(item.pixels, np.ndarray)
    ours = (item.pixels * settings.rescale_factor - np.reshape(settings.mean, (3, 1, 1))) / settings.std[0]
    np.testing.assert_allclose(ours, stock, atol=1e-6)
    for step in ("do_rescale", "do_resize"):
        edit(PROCESSOR, **{step: None})(folder)
        with pytest.raises(CheckpointError, match=f"preprocessor_config.json: .*unsupported {step}: null"):
            load(folder)
        edit(PROCESSOR, **{step: True})(folder)


@pytest.mark.parametrize(("height", "width"), [(84, 70), (80, 75)])
def test_dinov2_takes_tiles_of_any_size_of_its_processor(height: int, width: int, copied: Checkpoints) -> None:
    folder = copied("dinov2")
    edit(PROCESSOR, size={"shortest_edge": 84}, crop_size={"height": height, "width": width})(folder)
    rig, stock = Rig.of(folder, torch.float32, torch.device("cpu")), AutoModel.from_pretrained(folder, dtype="float32")
    (item,) = rig.items([Grid(2, 1, 1)])
    with torch.no_grad():
        states = stock(rig.pixels(Grid(2, 1, 1), 0).view(2, 3, height, width)).last_hidden_state
    assert error(rig.run([item])[0], states[:, 1:].flatten(0, 1).numpy()) <= TOLERANCE


def test_patches_that_do_not_cover_a_tile(copied: Checkpoints) -> None:
    """As of SigLIP with 384 pixels and patches of 14: the last pixels of each side belong to no patch."""
    folder = copied("siglip")
    config(vision_config__image_size=60)(folder)
    edit(PROCESSOR, size={"height": 60, "width": 60})(folder)
    rig, stock = Rig.of(folder, torch.float32, torch.device("cpu")), AutoModel.from_pretrained(folder, dtype="float32")
    (item,) = rig.items([Grid(2, 1, 1)])
    assert item.footprint.tokens == 2 * 16
    with torch.no_grad():
        states = stock.vision_model(rig.pixels(Grid(2, 1, 1), 0).view(2, 3, 60, 60)).last_hidden_state
    assert error(rig.run([item])[0], states.flatten(0, 1).numpy()) <= TOLERANCE
