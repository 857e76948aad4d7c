"""A tower with trained weights: real photographs, altered as the web alters them, against plain transformers."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

from plain_reference import PlainReference
from reference import TOLERANCE, Array, error, norm_error
from rigs import Rig
from servers import serving
from trained import ONNX, write_trained
from vitwire import Client, Item
from vitwire_server.core.grids import Grid
from vitwire_server.core.pooling import Pooling

NAMES = (
    "astronaut.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "motorcycle_left.png",
    "rocket.jpg",
)
PHOTOGRAPHS = [Path(skimage.__file__).parent / "data" / name for name in NAMES]
CPU = torch.device("cpu")
TILE = Grid(1, 1, 1)
Pixels = Callable[[Sequence[Image.Image]], Tensor]
Vectors = Callable[[Sequence[Image.Image], Pooling, torch.dtype], list[Array]]


def jpeg(image: Image.Image, quality: int) -> bytes:
    with io.BytesIO() as file:
        image.save(file, "JPEG", quality=quality)
        return file.getvalue()


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


def scaled(image: Image.Image, factor: float) -> Image.Image:
    return image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.LANCZOS)


ALTERED: Mapping[str, Callable[[Image.Image], bytes]] = {
    "quality 75": lambda image: jpeg(image, 75),
    "quality 10": lambda image: jpeg(image, 10),
    "mirrored": lambda image: jpeg(ImageOps.mirror(image), 95),
    "half": lambda image: jpeg(scaled(image, 0.5), 95),
    "larger": lambda image: jpeg(scaled(image, 1.6), 95),
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert ONNX.exists(), "`make test TIER=versions` installs the weights"
    folder = tmp_path_factory.mktemp("trained") / "dinov2-small"
    write_trained(folder)
    return folder


@pytest.fixture(scope="session")
def photographs() -> Mapping[str, Image.Image]:
    return {path.name: Image.open(path).convert("RGB") for path in PHOTOGRAPHS}


@pytest.fixture(scope="session")
def pixels(trained: Path) -> Pixels:
    """What the model's own processor makes of pictures."""
    processor = BitImageProcessorPil.from_pretrained(trained)
    return lambda images: torch.from_numpy(np.asarray(processor(list(images), return_tensors="np")["pixel_values"]))


@pytest.fixture(scope="session")
def transformers_vectors(trained: Path, pixels: Pixels) -> Vectors:
    """Rows of each picture, alone, by plain transformers."""
    reference = cache(lambda dtype: PlainReference(trained, dtype))

    def vectors(images: Sequence[Image.Image], pooling: Pooling, dtype: torch.dtype) -> list[Array]:
        return [reference(dtype).pooled(pooling, pixels([image])) for image in images]

    return vectors


@pytest.fixture(scope="module")
def client(trained: Path) -> Iterator[Client]:
    flags = ("--dtype", "float32", "--graphs", "simulated", "--pooling", "cls")
    with serving(trained, *flags) as server, Client(server.target, timeout=200) as one:
        yield one


@pytest.fixture(scope="module")
def originals(
    client: Client, photographs: Mapping[str, Image.Image], transformers_vectors: Vectors
) -> tuple[Array, Array]:
    """A vector of each photograph's file, from the server and by transformers."""
    files = client.encode([Item.from_file(path) for path in PHOTOGRAPHS])
    expected = transformers_vectors(list(photographs.values()), Pooling.CLS, torch.float32)
    return np.concatenate([each.numpy() for each in files]), np.concatenate(expected)


def test_files_and_pictures_are_embedded_as_transformers_does(
    client: Client, photographs: Mapping[str, Image.Image], originals: tuple[Array, Array]
) -> None:
    files, expected = originals
    assert error(files, expected) <= TOLERANCE
    pictures = client.encode_images([np.asarray(image) for image in photographs.values()])
    assert error(np.concatenate([each.numpy() for each in pictures]), expected) <= TOLERANCE


@pytest.mark.parametrize("alteration", ALTERED)
def test_what_was_altered_has_the_neighbours_that_transformers_finds(
    alteration: str,
    client: Client,
    photographs: Mapping[str, Image.Image],
    originals: tuple[Array, Array],
    transformers_vectors: Vectors,
) -> None:
    files = [ALTERED[alteration](image) for image in photographs.values()]
    altered = [each.numpy() for each in client.encode_images(files)]
    expected = transformers_vectors([opened(file) for file in files], Pooling.CLS, torch.float32)
    ours, theirs = (unit(rows) @ unit([own]).T for rows, own in zip((altered, expected), originals, strict=True))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    right, as_right = (int((near.argmax(1) == np.arange(len(files))).sum()) for near in (ours, theirs))
    assert right >= as_right >= len(files) - 1


@pytest.mark.parametrize("pooling", [Pooling.NONE, Pooling.CLS, Pooling.MEAN])
def test_graphs_change_no_row(
    pooling: Pooling,
    trained: Path,
    photographs: Mapping[str, Image.Image],
    pixels: Pixels,
    transformers_vectors: Vectors,
) -> None:
    images = list(photographs.values())[:4]
    rig = Rig.of(trained, torch.float32, CPU, sizes=(1024,), pooling=pooling)
    rig.poison()
    encoded = rig.run([rig.item(TILE, pixels([image])) for image in images])
    for rows, expected in zip(encoded, transformers_vectors(images, pooling, torch.float32), strict=True):
        assert error(rows, expected) <= TOLERANCE


def test_bfloat16_loses_no_more_than_transformers_does(
    trained: Path,
    photographs: Mapping[str, Image.Image],
    pixels: Pixels,
    transformers_vectors: Vectors,
) -> None:
    images = list(photographs.values())[:3]  # many CPUs emulate bfloat16
    exact, rounded = (transformers_vectors(images, Pooling.CLS, dtype) for dtype in (torch.float32, torch.bfloat16))
    rig = Rig.of(trained, torch.bfloat16, CPU, sizes=(), pooling=Pooling.CLS)
    found = rig.run([rig.item(TILE, pixels([image]).bfloat16()) for image in images])
    ours, theirs = ([norm_error(*pair) for pair in zip(rows, exact, strict=True)] for rows in (found, rounded))
    print(f"lost: {np.mean(ours):.5f} on average, {max(ours):.5f} at most; {np.mean(theirs):.5f}, {max(theirs):.5f}")
    assert np.mean(ours) <= 1.1 * np.mean(theirs)
    similarity = (unit(found) * unit(exact)).sum(1)
    assert similarity.min() >= (unit(rounded) * unit(exact)).sum(1).min() - 1e-4
    assert (unit(found) @ unit(exact).T).argmax(1).tolist() == list(range(len(images)))


def unit(rows: Sequence[Array]) -> Array:
    """Vectors of length 1, one below the other."""
    joined = np.concatenate(rows).astype(np.float64)
    return joined / np.linalg.norm(joined, axis=1, keepdims=True)
