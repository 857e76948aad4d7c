"""Tiles, two resolutions and NaViT patches over the wire, from real server processes, against plain transformers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor

from checkpoints import Checkpoints
from entered import entered
from prepared import clip_items, image_items, of_clips, of_images
from raster_reference import RasterReference
from reference import TOLERANCE, Array, error
from servers import ServerProcess, serving
from tile_reference import TileReference
from vitwire import Client, InvalidItem, Item
from vitwire_server.core.models import Preprocessing
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.towers.registry import FAMILIES

References = Callable[..., TileReference | RasterReference]
OTHERS = ("llava_next", "llava_next_video", "llava", "cohere2_vision", "smolvlm")
SERVED = (
    "internvl",
    "internvl_chat",
    "step3p7",
    "deepseek_vl_hybrid",
    "mistral3",
    *(pytest.param(name, marks=pytest.mark.matrix) for name in OTHERS),
)
CLIPS = ("internvl", "internvl_chat", "smolvlm", "llava_next_video")
PHOTOGRAPH = Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg"


@dataclass(frozen=True, slots=True)
class Served:
    """A server of one model, and what its rows are compared with."""

    model_type: str
    process: ServerProcess
    reference: TileReference | RasterReference
    folder: Path
    images: Recipe


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, checkpoints: Checkpoints, references: References) -> Iterator[Served]:
    flags = ("--dtype", "float32", "--graphs", "simulated", "--max-budget-tokens", "160")
    folder = checkpoints(request.param)
    with serving(folder, *flags) as process:
        yield Served(request.param, process, references(request.param, torch.float32), folder, of_images(folder))


def pictures() -> list[Image.Image]:
    """A photograph, a wide and a tall part of it, and a small one."""
    whole = Image.open(PHOTOGRAPH).convert("RGB")
    return [whole, whole.crop((0, 100, 512, 220)), whole.crop((200, 0, 330, 600)), whole.resize((60, 50))]


def normalised(pixels: np.ndarray, settings: Preprocessing) -> Tensor:
    """uint8 pixels as the model's processor would have emitted them."""
    shaped = torch.from_numpy(pixels).double().view(len(pixels), 3, -1)
    mean, std = (torch.tensor(values).view(-1, 1) for values in (settings.mean, settings.std))
    return ((shaped * settings.rescale_factor - mean) / std).float().view(pixels.shape)


def expected(served: Served, item: Item, settings: Preprocessing) -> Array:
    pixels, crops = (
        normalised(tensor, settings) if isinstance(tensor, np.ndarray) else None for tensor in (item.pixels, item.crops)
    )
    assert pixels is not None
    return served.reference.item(item.grid, pixels, crops)


client = entered(lambda served: Client(served.process.target))


def test_images_equal_transformers(served: Served, client: Client) -> None:
    settings = served.images.settings
    items = image_items(pictures(), served.images)
    if served.model_type == "deepseek_vl_hybrid":  # its crops are normalised in another way
        items = [Item(x.pixels, x.grid, crops=normalised(x.crops, CROPS).numpy()) for x in items]
        own = client.encode(items)
        wanted = [served.reference.item(x.grid, normalised(x.pixels, settings), Tensor(x.crops)) for x in items]
    else:
        own = client.encode_images(pictures())
        wanted = [expected(served, item, settings) for item in items]
    for mine, theirs in zip(own, wanted, strict=True):
        assert error(mine.numpy(), theirs) <= TOLERANCE
    assert "graph" in {embedding.report.path for embedding in own}


def test_tiles_as_a_processor_emits_them_need_no_layout(served: Served, client: Client) -> None:
    """All but the number of tiles may be unknown; rows are the same."""
    if FAMILIES[served.model_type].layout != "tiles" or served.model_type == "llava_next_video":
        return
    for item in image_items(pictures(), served.images):
        (known,) = client.encode([item])
        (unknown,) = client.encode([Item(item.pixels, (item.grid[0], 1, 1), crops=item.crops)])
        assert error(unknown.numpy(), known.numpy()) <= TOLERANCE
    whole = image_items(pictures(), served.images)[1]
    with pytest.raises(InvalidItem, match=r"rows and columns are not known, the grid is \(t, 1, 1\)"):
        client.encode([Item(whole.pixels, (90, 3, 3), crops=whole.crops)])


CROPS = Preprocessing(1, 1, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 1 / 255, 3)


def test_a_large_request_travels_in_chunks(served: Served, client: Client) -> None:
    """Crops follow the pixels of their item on the stream."""
    items = image_items(pictures(), served.images)
    together = client.encode(items)
    before = served.process.metric("vitwire_requests_total", method="EncodeStream", code="OK")
    many = items * (1 + (6 << 20) // sum(_bytes(item) for item in items))
    apart = [each for start in range(0, len(many), 64) for each in client.encode(many[start : start + 64])]
    if len(many) <= 64:
        assert served.process.metric("vitwire_requests_total", method="EncodeStream", code="OK") > before
    for index, embedding in enumerate(apart):
        assert error(embedding.numpy(), together[index % len(items)].numpy()) <= TOLERANCE


def _bytes(item: Item) -> int:
    return sum(tensor.nbytes for tensor in (item.pixels, item.crops) if isinstance(tensor, np.ndarray))


def test_frames_of_a_clip_are_tiles(served: Served, client: Client) -> None:
    frames = [picture.resize((64, 48)) for picture in pictures()[:3]]
    if served.model_type not in CLIPS:
        assert "video" not in client.model().prepared
        item = image_items(frames[:1], served.images)[0]
        with pytest.raises(InvalidItem, match="does not accept videos"):
            client.encode([Item(item.pixels, item.grid, "video", crops=item.crops)])
        return
    (item,) = clip_items([frames], of_clips(served.folder))
    assert item.grid == (3, 1, 1)
    (embedding,) = client.encode_clips([frames])
    assert error(embedding.numpy(), expected(served, item, of_clips(served.folder).settings)) <= TOLERANCE
    (pruned,) = client.encode([Item(item.pixels, item.grid, "video", keep_ratio=0.5)])
    assert len(pruned.numpy()) == len(embedding.numpy()) // 2
    first = len(embedding.numpy()) // len(frames)
    np.testing.assert_allclose(pruned.numpy()[:first], embedding.numpy()[:first], atol=1e-5)


BATCHES = {"internvl": {}, "deepseek_vl_hybrid": {}, "mistral3": {"patch_size": {"height": 28, "width": 28}}}
"""Options of the image processors that need no torchvision, as the processors of text and images set them."""


def test_a_batch_of_a_processor_is_encoded_as_it_is(served: Served, checkpoints: Checkpoints, client: Client) -> None:
    """With the rows of pictures, which the server prepares. test_batches.py runs over more models, in the matrix."""
    if served.model_type not in BATCHES:
        pytest.skip("its processor needs torchvision, or gives no numbers of tiles")
    processor = AutoImageProcessor.from_pretrained(checkpoints(served.model_type), backend="pil")
    outputs = processor(images=pictures(), return_tensors="pt", **BATCHES[served.model_type])
    embeddings, items = client.encode_batch(outputs), Item.from_processor(outputs, client.model())
    for embedding, item in zip(embeddings, items, strict=True):
        assert isinstance(item.pixels, Tensor)
        crops = None if item.crops is None else torch.as_tensor(item.crops)
        assert error(embedding.numpy(), served.reference.item(item.grid, item.pixels, crops)) <= TOLERANCE
    for embedding, other in zip(embeddings, client.encode_images(pictures()), strict=True):
        assert error(embedding.numpy(), other.numpy()) <= 1e-4, "floats that were rounded before, and uint8 pixels"


def test_what_does_not_fit_the_model_is_refused(served: Served, client: Client) -> None:
    item = image_items([pictures()[0].resize((60, 60))], served.images)[0]
    assert isinstance(item.pixels, np.ndarray)
    with pytest.raises(InvalidItem, match=r"pixels\.shape"):
        client.encode([Item(item.pixels[..., 1:], item.grid, crops=item.crops)])
    with pytest.raises(InvalidItem, match=r"grid|pixels|crops"):
        client.encode([Item(item.pixels, (9, item.grid[1], item.grid[2]), crops=item.crops)])
    if served.model_type == "llava_next_video":  # without a layout, tiles would be a clip
        with pytest.raises(InvalidItem, match=r"of an image must be \(1 \+ rows \* columns, rows, columns\)"):
            client.encode([Item(item.pixels, (item.grid[0], 1, 1))])
    if item.crops is None:
        with pytest.raises(InvalidItem, match=r"crops.*takes no crops"):
            client.encode([Item(item.pixels, item.grid, crops=np.zeros((1, 3, 5, 5), np.uint8))])
    else:
        with pytest.raises(InvalidItem, match=r"crops.*is missing"):
            client.encode([Item(item.pixels, item.grid)])
