"""Pictures in memory: what the client sends of Pillow images and arrays, and that it needs no Pillow."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, PngImagePlugin

from both_clients import both
from fake_service import Running, item
from vitwire import InvalidItem, Item, VitwireError
from vitwire._delivery.answers import Expected
from vitwire._inputs.sources import pixels_of, pixels_of_frames
from vitwire._transport.uploads import to_wire

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8))


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "CMYK", "YCbCr", "HSV", "P"])
def test_images_without_alpha_are_sent_in_rgb(mode: str) -> None:
    image = PHOTO.convert(mode)
    np.testing.assert_array_equal(pixels_of(image), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_images_with_alpha_keep_it(mode: str) -> None:
    image = PHOTO.convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    image = image.convert(mode)
    np.testing.assert_array_equal(pixels_of(image), np.asarray(image.convert("RGBA")))


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_a_transparent_colour_becomes_alpha(mode: str) -> None:
    image = PHOTO.convert(mode)
    image.info["transparency"] = image.getpixel((0, 0))
    assert pixels_of(image)[0, 0, 3] == 0


def tagged(orientation: object, kind: str, mode: str) -> Image.Image:
    """A picture whose file has an orientation in its EXIF data."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    PHOTO.convert(mode).save(file, kind, exif=exif)
    return Image.open(file)


@pytest.mark.parametrize("orientation", range(11))
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("JPEG", mode) for mode in ("RGB", "L", "CMYK")),
        *(("PNG", mode) for mode in ("RGB", "RGBA", "L", "LA", "P", "1")),
        *(("WEBP", mode) for mode in ("RGB", "RGBA")),
        *(("TIFF", mode) for mode in ("RGB", "I;16")),
    ],
)
def test_images_are_turned_upright(orientation: int, kind: str, mode: str) -> None:
    image = tagged(orientation, kind, mode)
    upright = ImageOps.exif_transpose(image)
    expected = np.asarray(upright.convert("RGBA" if upright.mode in ("RGBA", "LA") else "RGB"))
    for source in (image, image.copy(), image.crop((0, 0, *image.size)), upright):
        np.testing.assert_array_equal(pixels_of(source), expected)
    np.testing.assert_array_equal(Item.from_image(image).pixels, expected)
    frames = pixels_of_frames([image, image, upright])
    np.testing.assert_array_equal(frames, np.stack([expected] * 3))
    stored = np.asarray(image.convert("RGB"))
    assert pixels_of(stored) is stored, "arrays have no tag"


def test_images_whose_tag_is_odd() -> None:
    """Only after the pixels of a PNG, in XMP, and of types that the format does not know."""
    image = tagged(6, "PNG", "RGB")
    data = image.fp.getvalue()
    start = data.index(b"eXIf") - 4
    length = 12 + int.from_bytes(data[start : start + 4], "big")
    late = data[:start] + data[start + length : -12] + data[start : start + length] + data[-12:]
    xmp = PngImagePlugin.PngInfo()
    xmp.add_itxt("XML:com.adobe.xmp", '<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>')
    file = io.BytesIO()
    PHOTO.save(file, "PNG", pnginfo=xmp)
    for each in (io.BytesIO(late), file):
        np.testing.assert_array_equal(pixels_of(Image.open(each)), np.rot90(np.asarray(PHOTO), -1))
    for value in ((6, 6), b"6", "6", 6.5):
        image = PHOTO.copy()
        image.getexif()[0x0112] = value
        np.testing.assert_array_equal(pixels_of(image), np.asarray(PHOTO))


def test_an_image_whose_exif_data_cannot_be_read() -> None:
    image = PHOTO.copy()
    image.info["exif"] = b"Exif\0\0nonsense"
    with pytest.raises(ValueError, match="cannot be read"):
        pixels_of(image)


def test_arrays_stay_views() -> None:
    array = np.zeros((20, 30, 3), np.uint8)
    for source, shape in (
        (array, (20, 30, 3)),
        (array.transpose(2, 0, 1), (20, 30, 3)),
        (array[..., 0], (20, 30, 3)),
        (array[..., :1], (20, 30, 3)),
        (np.zeros((4, 20, 30), np.uint8), (20, 30, 4)),
    ):
        pixels = pixels_of(source)
        assert pixels.shape == shape
        assert np.shares_memory(pixels, source)


def test_a_picture_travels_without_a_grid() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    for source in (pixels, torch.from_numpy(pixels), np.asfortranarray(pixels)):
        sent = to_wire(Item(source), "bfloat16")
        assert not sent.message.HasField("grid")
        assert tuple(sent.message.pixels.shape) == (2, 4, 3)
        assert bytes(sent.tensors.pixels) == pixels.tobytes()
    assert Item.from_image(PHOTO, content_id="a").content_id == "a"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"pixels": np.zeros((4, 4, 3), np.float32)}, "grid"),
        ({"pixels": np.zeros((4, 4, 2), np.uint8)}, "grid"),
        ({"pixels": np.zeros((4, 12), np.uint8)}, "grid"),
        ({"pixels": np.zeros((0, 4, 3), np.uint8)}, "grid"),
        ({"pixels": np.zeros((2, 4, 4, 3), np.uint8)}, "grid"),
        ({"pixels": np.zeros((4, 4, 3), np.uint8), "modality": "video"}, "grid"),
        ({"pixels": np.zeros((4, 4, 3), np.uint8), "crops": np.zeros((1, 3, 4, 4), np.uint8)}, "crops"),
        ({"pixels": [[0]]}, "pixels"),
    ],
)
def test_what_is_no_picture_needs_a_grid(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidItem) as raised:
        Item(**fields)
    assert [each.field for each in raised.value.violations] == [field]


def test_frames() -> None:
    frames = np.random.default_rng(1).integers(0, 255, (3, 8, 10, 3), np.uint8)
    assert pixels_of_frames(frames) is frames
    images = [Image.fromarray(frame) for frame in frames]
    for source in (list(frames), tuple(images), [frames[0], images[1], frames[2].transpose(2, 0, 1)]):
        np.testing.assert_array_equal(pixels_of_frames(source), frames)
    np.testing.assert_array_equal(pixels_of_frames(frames.transpose(0, 3, 1, 2)), frames)
    mixed = pixels_of_frames([images[0], images[1].convert("RGBA")])
    assert mixed.shape == (2, 8, 10, 4)
    assert (mixed[..., 3] == 255).all()
    with pytest.raises(ValueError, match=r"one size, got \(8, 10\) and, at 1, \(10, 8\)"):
        pixels_of_frames([frames[0], frames[0].transpose(1, 0, 2)])
    with pytest.raises(ValueError, match="frame 1: expected an array of uint8"):
        pixels_of_frames([frames[0], frames[0].astype(np.float32)])


@both
async def test_a_server_that_prepares_nothing_is_named(client: Any, running: Running) -> None:
    running.fake.prepares = False
    for encode in (client.encode_images, client.encode_clips):
        with pytest.raises(VitwireError, match=r"prepares no .*--decode-processes 0"):
            await encode([])
    assert (await client.encode([item(2)]))[0].shape == (2, 12)
    assert Expected.of(item(2), await client.model()).rows == 2, "which NIXL leases memory by"


SCRIPT = """
import sys

class Refuse:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] == "PIL":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
import numpy as np
from vitwire import Client, Item
with Client(sys.argv[1], timeout=20) as client:
    shapes = [each.shape for each in client.encode_images([sys.argv[2], open(sys.argv[2], "rb").read(),
                                                           np.zeros((20, 30, 3), np.uint8)])]
    clip = client.encode_clips([np.zeros((2, 20, 30, 3), np.uint8)])[0].shape
    assert client.encode([Item.from_file(sys.argv[2])])[0].shape == shapes[0]
assert not {"PIL", "torch", "transformers"} & sys.modules.keys()
print(shapes, clip)
"""


def test_nothing_needs_pillow(running: Running, tmp_path: Path) -> None:
    PHOTO.save(tmp_path / "photo.png")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", SCRIPT, running.target, str(tmp_path / "photo.png")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{[(8, 12)] * 3} (8, 12)"
