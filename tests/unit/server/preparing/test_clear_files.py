"""Transparency in files: put on white as that of pictures in memory, as transformers and vLLM's reader do it."""

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from clear_files import CLEAR, black_text
from encoded_files import photograph, saved
from prepared import recipe
from vitwire._inputs.sources import pixels_of
from vitwire_server.preparing import pillow
from vitwire_server.preparing.files import images

AREA = {"min_pixels": 28 * 28, "max_pixels": 400 * 400}
WHITE = recipe(**AREA, patch=14, merge=2, temporal=2)
DROPS = replace(WHITE, settings=replace(WHITE.settings, drops_transparency=True))


def opened(file: bytes) -> Image.Image:
    """The picture in memory, upright."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(file)))


def as_vllm(image: Image.Image) -> Image.Image:
    """`convert_image_mode` of vLLM's `vllm/multimodal/image.py`, written down for "RGB"."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.split()[3])
        return white
    return image.convert("RGB")


@pytest.mark.parametrize("name", CLEAR)
def test_files_are_put_on_white(name: str) -> None:
    file = CLEAR[name]()
    found = np.asarray(images.decode(file, WHITE))
    assert images.measure(file, WHITE, 1 << 26).picture == found.shape
    in_memory = pixels_of(opened(file))
    assert in_memory.shape[-1] == 4, "else it is no test"
    assert (in_memory[..., 3] < 255).any(), "as above"
    np.testing.assert_array_equal(found, pillow.flattened(in_memory, WHITE))
    np.testing.assert_array_equal(found, as_vllm(opened(file)))
    np.testing.assert_array_equal(found, convert_to_rgb(opened(file), return_numpy=True))


@pytest.mark.parametrize("name", CLEAR)
def test_patches_are_those_of_the_processor(name: str) -> None:
    file = CLEAR[name]()
    size = {"shortest_edge": AREA["min_pixels"], "longest_edge": AREA["max_pixels"]}
    stock = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, do_rescale=False, do_normalize=False, size=size)
    theirs = stock(opened(file), return_tensors="np")
    own = pillow.image(images.decode(file, WHITE), WHITE)
    assert own.grid == tuple(theirs["image_grid_thw"][0])
    frames = theirs["pixel_values"].reshape(len(own.pixels), 3, 2, 14 * 14)
    np.testing.assert_array_equal(own.pixels.reshape(len(own.pixels), 3, 14 * 14), frames[:, :, 0])


@pytest.mark.parametrize("name", CLEAR)
def test_files_are_as_pictures_where_transparency_is_dropped(name: str) -> None:
    file = CLEAR[name]()
    dropped = pillow.flattened(pixels_of(opened(file)), DROPS)
    np.testing.assert_array_equal(np.asarray(images.decode(file, DROPS)), dropped)
    assert name != "black text" or not dropped.any()


def test_every_alpha_of_every_value() -> None:
    alpha, value = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    values = np.stack([value, value, value, alpha], axis=-1)
    file = saved(Image.fromarray(values), "PNG")
    np.testing.assert_array_equal(np.asarray(images.decode(file, WHITE)), pillow.flattened(values, WHITE))


def test_text_stays_dark_on_white() -> None:
    found = np.asarray(images.decode(saved(black_text(), "PNG"), WHITE))
    assert (found == 255).mean() > 0.5
    assert found.min() == 0


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_opaque_files_are_as_before(kind: str) -> None:
    photo = photograph(60, 90)
    file = saved(photo.convert("RGBA"), kind, **({"lossless": True} if kind == "WEBP" else {}))
    np.testing.assert_array_equal(np.asarray(images.decode(file, WHITE)), np.asarray(photo))
