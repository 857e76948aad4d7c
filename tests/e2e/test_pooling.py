"""`--pooling`: one row per image from real servers, against transformers, and what clients see and servers refuse."""

import base64
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from skimage import data
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from checkpoints import Checkpoints
from entered import entered
from plain_reference import PlainReference
from reference import TOLERANCE, error
from servers import ServerProcess, serving, shell
from vitwire import Client, InvalidItem, Item, NotCached
from vitwire_gateway.images.encoding import content_id_of
from vitwire_gateway.images.image_files import ImageFile
from vitwire_server.core.pooling import Pooling

PHOTOGRAPH = Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg"
FILE = ImageFile.of(b"file")
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations" / "search.md"
CLIP = ("--dtype", "float32", "--graphs", "simulated", "--max-budget-tokens", "96", "--cache-bytes", "1000000")
TARGET = "localhost:50051"

server = entered(lambda checkpoints: serving(checkpoints("clip"), *CLIP, "--pooling", "cls"))
client = entered(lambda server: Client(server.target))


def photographs() -> list[Image.Image]:
    with Image.open(PHOTOGRAPH) as opened:
        portrait = opened.convert("RGB")
    return [portrait, Image.fromarray(data.astronaut()), portrait.crop((0, 100, 512, 220)), portrait.resize((40, 30))]


def test_photographs_are_embedded_as_transformers_does(
    client: Client, checkpoints: Checkpoints, references: Callable[..., PlainReference]
) -> None:
    reference, images = references("clip", torch.float32), photographs()
    processor = CLIPImageProcessorPil.from_pretrained(checkpoints("clip"))
    pixels = torch.from_numpy(np.asarray(processor(images, return_tensors="np")["pixel_values"]))
    expected = reference.model.get_image_features(pixel_values=pixels).pooler_output.detach().numpy()
    embeddings = client.encode_images(images)
    assert [embedding.shape for embedding in embeddings] == [(1, 48)] * len(images)
    assert error(np.concatenate([embedding.numpy() for embedding in embeddings]), expected) <= TOLERANCE
    batch = client.encode_batch(pixels)
    assert error(np.concatenate([embedding.numpy() for embedding in batch]), expected) <= TOLERANCE
    frames = np.stack([np.asarray(image.resize((90, 70))) for image in images])
    (clip,) = client.encode_clips([frames])
    alone = client.encode_images(list(frames))
    np.testing.assert_allclose(clip.numpy(), np.concatenate([each.numpy() for each in alone]), atol=1e-6)
    assert clip.report.tokens == len(frames), "a row for each frame"
    blank = np.zeros((3, 3, 56, 56), np.float32)
    with pytest.raises(InvalidItem, match=r"keep_ratio: must be 0: each frame has one vector, .* --pooling cls"):
        client.encode([Item(blank, (3, 1, 1), modality="video", keep_ratio=0.5)])


def test_every_pooling_of_a_model_is_known_to_clients_and_has_its_own_fingerprint(
    client: Client, checkpoints: Checkpoints, references: Callable[..., PlainReference]
) -> None:
    """The same content under the same id: an id alone never names rows of another pooling."""
    folder, pixels = checkpoints("clip"), np.random.default_rng(0).standard_normal((1, 3, 56, 56), dtype=np.float32)
    item = Item(pixels, (1, 1, 1), content_id="same")
    first = client.encode([item])[0]
    found = {client.model().weights_fingerprint: content_id_of(FILE, client.model(), b"key")}
    for pooling, rows in ((Pooling.NONE, 16), (Pooling.MEAN, 1)):
        with serving(folder, *CLIP, "--pooling", pooling) as other, Client(other.target) as its:
            model = its.model()
            assert (model.pooling, model.available_poolings) == (pooling, ("none", "cls", "mean"))
            with pytest.raises(NotCached):
                its.encode([Item(None, (1, 1, 1), content_id="same")])
            (embedding,) = its.encode([item])
            assert embedding.shape[0] == rows
            expected = references("clip", torch.float32).pooled(pooling, torch.from_numpy(pixels))
            assert error(embedding.numpy(), expected) <= TOLERANCE
            found[model.weights_fingerprint] = content_id_of(FILE, model, b"key")
    assert len(found) == len(set(found.values())) == 3, "neither caches nor the router's engines mix their rows"
    (again,) = client.encode([Item(None, (1, 1, 1), content_id="same")])
    np.testing.assert_array_equal(again.numpy(), first.numpy())


def test_pooled_rows_of_patches_of_any_number(
    checkpoints: Checkpoints, references: Callable[..., PlainReference]
) -> None:
    """SigLIP 2 NaFlex: images of several sizes in a batch, by its pooling head, over several RPC processes."""
    flags = ("--dtype", "float32", "--graphs", "simulated", "--pooling", "attention", "--rpc-processes", "2")
    rng = np.random.default_rng(2)
    grids = [(1, 4, 6), (1, 16, 16), (1, 1, 1), (1, 3, 20)]
    pixels = [rng.standard_normal((h * w, 3 * 14 * 14), dtype=np.float32) for _, h, w in grids]
    reference = references("siglip2", torch.float32)
    with serving(checkpoints("siglip2"), *flags) as server, Client(server.target) as client:
        assert client.model().available_poolings == ("none", "attention", "mean")
        items = [Item(own, grid) for own, grid in zip(pixels, grids, strict=True)]
        for own, grid, embedding in zip(pixels, grids, client.encode(items), strict=True):
            expected = reference.pooled(Pooling.ATTENTION, torch.from_numpy(own), grid)
            assert error(embedding.numpy(), expected) <= TOLERANCE


def test_what_a_model_does_not_offer_is_refused_at_start(checkpoints: Checkpoints) -> None:
    with serving(checkpoints("clip"), "--pooling", "attention", wait=False) as server:
        assert server.process.wait(60) == 2
        assert re.search(r"--pooling attention: CLIP \(clip\) offers none, cls, mean\n", server.log())


def test_the_command_line_says_which_pooling(server: ServerProcess, tmp_path: Path) -> None:
    shown = vitwire("info", "--target", server.target, "--json")
    described = json.loads(shown.splitlines()[-1])
    assert (described["pooling"], described["available_poolings"]) == ("cls", ["none", "cls", "mean"])
    assert re.search(r"pooling +cls", shown)
    out = tmp_path / "rows.safetensors"
    shown = vitwire("encode", str(PHOTOGRAPH), "--out", str(out), "--target", server.target, "--json")
    assert "pooling: cls" in shown
    document = json.loads(shown.splitlines()[-1])
    assert (document["pooling"], document["items"][0]["shape"]) == ("cls", [1, 48])
    with safe_open(out, "np") as written:
        assert written.metadata()["pooling"] == "cls"


def test_the_line_of_the_document(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    """The grpcurl line of docs/operations/search.md returns one row of a photograph."""
    (script,) = re.findall(r"```sh\n(grpcurl .*?)```", OPERATIONS.read_text(encoding="utf-8"), re.DOTALL)
    with Image.open(PHOTOGRAPH) as opened:
        opened.save(tmp_path / "photo.jpg")
    answer = json.loads(shell(script.replace(TARGET, server.target), tmp_path))
    assert [int(side) for side in answer["chunk"]["shape"]] == [1, 48]
    row = np.frombuffer(base64.b64decode(answer["chunk"]["data"]), "<f4")
    (own,) = client.encode_images([tmp_path / "photo.jpg"])
    np.testing.assert_allclose(row, own.numpy()[0], atol=1e-6)


def vitwire(*arguments: str) -> str:
    command = [Path(sys.executable).with_name("vitwire"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
