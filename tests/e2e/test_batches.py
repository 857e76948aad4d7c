"""Outputs of Hugging Face processors, encoded by real servers as they are."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from checkpoints import Checkpoints
from raster_reference import RasterReference
from reference import TOLERANCE, Array, Reference, error
from servers import ServerProcess, serving
from tile_reference import TileReference
from vitwire import AsyncClient, Client, Embedding, Item

References = Callable[..., Reference | TileReference | RasterReference]
OTHERS = (
    "llava_onevision",
    "llava_next",
    "llava",
    "got_ocr2",
    "qwen2_vl",
    "glm4v",
    "paddleocr_vl",
    "video_llama_3",
    "internvl",
    "gemma3",
    "gemma4",
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "deepseek_ocr2",
    "ovis2",
    "aria",
    "florence2",
    "mistral3",
    "siglip2",
)
SERVED = ["qwen3_vl", *(pytest.param(name, marks=pytest.mark.matrix) for name in OTHERS)]
"""Tiles and crops are in tests/e2e/test_tiles.py every day."""
PHOTOGRAPH = Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg"


@dataclass(frozen=True, slots=True)
class Served:
    """A server of one model, its processor, and what its rows are compared with."""

    process: ServerProcess
    processor: Any
    reference: Reference | TileReference | RasterReference


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, checkpoints: Checkpoints, references: References) -> Iterator[Served]:
    folder = checkpoints(request.param)
    flags = ("--dtype", "float32", "--graphs", "off", "--cache-bytes", "100000000")
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    if request.param == "mistral3":  # as its processor of text and images sets it
        processor.patch_size = {"height": 28, "width": 28}
    with serving(folder, *flags) as process:
        yield Served(process, processor, references(request.param, torch.float32))


def pictures() -> list[Image.Image]:
    whole = Image.open(PHOTOGRAPH).convert("RGB")
    return [whole.resize((120, 160)), whole.crop((0, 100, 512, 220)).resize((256, 60)), whole.resize((60, 84))]


def outputs(served: Served, kind: str = "pt") -> Mapping[str, Any]:
    result: Mapping[str, Any] = served.processor(images=pictures(), return_tensors=kind)
    return result


def expected(served: Served) -> list[Array]:
    """Plain transformers, of each image alone."""
    with Client(served.process.target) as client:
        model = client.model()
    alone = [served.processor(images=[picture], return_tensors="pt") for picture in pictures()]
    items = [Item.from_processor(each, model)[0] for each in alone]
    return [served.reference.item(item.grid, item.pixels, item.crops) for item in items]


def check(embeddings: list[Embedding], wanted: list[Array]) -> None:
    for own, rows in zip(embeddings, wanted, strict=True):
        assert error(own.numpy(), rows) <= TOLERANCE


def test_outputs_are_encoded_as_transformers_encodes_each_image(served: Served) -> None:
    wanted = expected(served)
    with Client(served.process.target, timeout=120) as client:
        check(client.encode_batch(outputs(served)), wanted)
        check(client.encode(Item.from_processor(outputs(served, "np"), client.model())), wanted)

    async def encode() -> list[Embedding]:
        async with AsyncClient(served.process.target, timeout=120) as client:
            return await client.encode_batch(outputs(served))

    check(asyncio.run(encode()), wanted)


def test_contents_with_ids_are_uploaded_once(served: Served) -> None:
    def received() -> float:
        return served.process.metric("vitwire_received_bytes_total")

    names = ["a", "b", "c"]
    with Client(served.process.target, timeout=120) as client:
        first = client.encode_batch(outputs(served), content_ids=names)
        before = received()
        again = client.with_options(priority="batch").encode_batch(outputs(served), content_ids=names)
        assert received() - before < 4096
        client.encode_images(pictures(), content_ids=["d", "e", "f"])
        images = client.encode_images(pictures(), content_ids=["d", "e", "f"])
    assert {each.report.path for each in images} == {"cache"}
    assert {each.report.path for each in again} == {"cache"}
    for own, other in zip(again, first, strict=True):
        np.testing.assert_array_equal(own.numpy(), other.numpy())


@pytest.mark.parametrize("served", ["qwen3_vl"], indirect=True)
def test_clips_are_encoded_with_their_ratio(served: Served) -> None:
    pixels = torch.randn(2 * 4 * 4 * 4, 1536, dtype=torch.float64)
    grids = torch.tensor([[4, 4, 4], [4, 4, 4]])
    with Client(served.process.target, timeout=120) as client:
        whole = client.encode_batch(pixels, grids, modality="video")
        pruned = client.encode_batch(
            {"pixel_values_videos": pixels, "video_grid_thw": grids}, keep_ratio=0.5, output_type="float16"
        )
        frames = np.random.default_rng(0).integers(0, 255, (4, 64, 64, 3)).astype(np.uint8)
        (clip,) = client.encode_clips([frames], keep_ratio=0.5, content_ids=["clip"])
        (again,) = client.encode_clips([frames], keep_ratio=0.5, content_ids=["clip"])
    assert [each.shape[0] for each in whole] == [16, 16]
    assert [(each.shape[0], each.dtype) for each in pruned] == [(8, "float16")] * 2
    assert clip.shape[0] == len(clip.report.kept) > 0
    assert again.report.path == "cache"
    check(whole, [served.reference.item((4, 4, 4), part.float()) for part in pixels.split(64)])
