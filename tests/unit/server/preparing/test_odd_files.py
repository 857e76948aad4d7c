"""GIFs and BMPs that today's programs do not write, beside Pillow and transformers; orientations of odd types."""

import io
import struct
import warnings
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from encoded_files import FURTHER, photograph, saved
from odd_files import BMPS, GIFS
from prepared import recipe
from vitwire_children.serving import NotDone
from vitwire_server.preparing import pillow
from vitwire_server.preparing.files import images
from vitwire_server.preparing.rules.recipe import Recipe

AREA = {"min_pixels": 28 * 28, "max_pixels": 400 * 400}
WHITE = recipe(**AREA, patch=14, merge=2, temporal=2)
DROPS = replace(WHITE, settings=replace(WHITE.settings, drops_transparency=True))
FILES = {**GIFS, **BMPS, **FURTHER}
ORIENTATIONS = {
    "long": (4, struct.pack("<I", 6)),
    "byte": (1, b"\6\0\0\0"),
    "text": (2, b"6\0\0\0"),
    "undefined": (7, b"\6\0\0\0"),
    "fraction": (5, struct.pack("<II", 6, 1)),
    "signed fraction": (10, struct.pack("<ii", 6, 1)),
    "float": (11, struct.pack("<f", 6)),
}
"""Types of EXIF, and a 6 of each; the format knows short only."""


def turned_by(kind: int, value: bytes) -> bytes:
    """A JPEG whose orientation has this type."""
    entry = struct.pack("<HHI", 0x112, kind, 1)
    inline = value if len(value) == 4 else struct.pack("<I", 26)
    behind = b"" if len(value) == 4 else value
    return saved(photograph(), exif=b"Exif\0\0II*\0\x08\0\0\0\1\0" + entry + inline + bytes(4) + behind)


def read(file: bytes, own: Recipe) -> np.ndarray:
    """The picture in a file, whose form was known from its header."""
    found = images.measure(file, own, 1 << 26)
    picture = images.decode(file, own)
    made = pillow.image(picture, own)
    assert (found.grid, found.pixels) == (made.grid, made.pixels.shape)
    assert found.picture == (picture.height, picture.width, 3)
    return np.asarray(picture)


def as_pillow(file: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(file)) as image, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_of_pillow(name: str) -> None:
    file = FILES[name]()
    pixels = read(file, DROPS)
    assert pixels.std() > 0
    assert np.array_equal(pixels, as_pillow(file))


@pytest.mark.parametrize("name", FILES)
def test_patches_are_those_of_the_processor(name: str) -> None:
    """With transparency as the processor has it."""
    file = FILES[name]()
    size = {"shortest_edge": AREA["min_pixels"], "longest_edge": AREA["max_pixels"]}
    stock = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, do_rescale=False, do_normalize=False, size=size)
    with Image.open(io.BytesIO(file)) as image:
        theirs = stock(image, return_tensors="np")
    own = pillow.image(images.decode(file, WHITE), WHITE)
    assert own.grid == tuple(theirs["image_grid_thw"][0])
    frames = theirs["pixel_values"].reshape(len(own.pixels), 3, 2, 14 * 14)
    assert np.array_equal(own.pixels.reshape(len(own.pixels), 3, 14 * 14), frames[:, :, 0])


@pytest.mark.parametrize("name", ORIENTATIONS)
def test_orientations_of_other_types(name: str) -> None:
    file = turned_by(*ORIENTATIONS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert np.array_equal(read(file, DROPS), as_pillow(file))


def test_a_pillow_without_avif_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images.AvifImagePlugin, "SUPPORTED", False)
    with pytest.warns(UserWarning, match="AVIF"), pytest.raises(NotDone, match="is an AVIF image, which the server's"):
        images.measure(FURTHER["animated avif"](), WHITE, 1 << 26)
