"""Images whose rows depend on the layout of their tiles, over the wire, as processors emit them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

from assembled_reference import AssembledReference
from checkpoints import Checkpoints
from layout_prompts import LAYOUT_PROMPTS
from reference import TOLERANCE, error
from servers import ServerProcess, serving
from vitwire import Client, InvalidItem, Item

References = Callable[..., AssembledReference]


@dataclass(frozen=True, slots=True)
class Served:
    """A server of one model, what its rows are compared with, and outputs of its processor."""

    model_type: str
    process: ServerProcess
    reference: AssembledReference
    outputs: dict[str, torch.Tensor]


@pytest.fixture(
    scope="module",
    params=[name if name == "mllama" else pytest.param(name, marks=pytest.mark.matrix) for name in LAYOUT_PROMPTS],
)
def served(request: pytest.FixtureRequest, checkpoints: Checkpoints, references: References) -> Iterator[Served]:
    folder = checkpoints(request.param)
    _, outputs = LAYOUT_PROMPTS[request.param](folder)
    with serving(folder, "--dtype", "float32", "--graphs", "simulated", "--max-budget-tokens", "280") as process:
        yield Served(request.param, process, references(request.param, torch.float32), outputs)


def test_outputs_of_a_processor_are_encoded_as_they_are(served: Served) -> None:
    with Client(served.process.target) as client:
        embeddings, items = client.encode_batch(served.outputs), Item.from_processor(served.outputs)
    for embedding, item in zip(embeddings, items, strict=True):
        assert isinstance(item.pixels, torch.Tensor)
        assert error(embedding.numpy(), served.reference.item(item.grid, item.pixels)) <= TOLERANCE
    assert "graph" in {embedding.report.path for embedding in embeddings}


def test_a_grid_that_says_no_layout_is_refused(served: Served) -> None:
    item = Item.from_processor(served.outputs)[0]
    assert isinstance(item.pixels, torch.Tensor)
    with Client(served.process.target) as client:
        with pytest.raises(InvalidItem, match="grid"):
            client.encode([Item(item.pixels, (len(item.pixels), 1, 1))])
        with pytest.raises(InvalidItem, match=r"pixels\.shape"):
            client.encode([Item(item.pixels[1:], item.grid)])


def test_images_are_prepared_as_the_processor_does(served: Served, checkpoints: Checkpoints) -> None:
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 255, (h, w, 3), np.uint8)) for h, w in ((60, 150), (40, 30), (99, 99))]
    with Client(served.process.target) as client:
        if served.model_type != "mllama":
            assert not client.model().prepared, "its overview is made in a way that is not known"
            return
        processor = MllamaImageProcessorPil.from_pretrained(checkpoints(served.model_type))
        own, theirs = (
            client.encode_images(pictures),
            client.encode_batch(dict(processor([pictures], return_tensors="pt"))),
        )
    for mine, other in zip(own, theirs, strict=True):
        assert error(mine.numpy(), other.numpy()) <= 1e-4, "uint8 pixels, and floats that were rounded before"
