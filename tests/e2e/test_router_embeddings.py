"""Embeddings of images by `vitwire router`, through the published clients of OpenAI and Cohere."""

import base64
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cohere
import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch
from openai import OpenAI
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from broken import edit
from checkpoints import Checkpoints
from embedding_calls import FLAGS, close, cohere_of, embedded, part, photographs, posted, unit, uri
from entered import entered
from plain_reference import PlainReference
from reference import TOLERANCE, error
from routers import RouterProcess, client_of, picture, router, user
from servers import ServerProcess, serving
from vitwire import Client

DOCUMENT = Path(__file__).parents[2] / "docs" / "embeddings.md"
WIDTH, TOKENS = 48, 16
"""Of an image in the tiny CLIP."""


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP whose vectors may be cut."""
    folder = shutil.copytree(checkpoints("clip"), tmp_path_factory.mktemp("cut") / "tiny-clip")
    edit("config.json", matryoshka_dimensions=[24, 40])(folder)
    return folder


server = entered(lambda checkpoint: serving(checkpoint, *FLAGS, "--pooling", "cls"))
co = entered(cohere_of, scope="function")


def test_photographs_are_embedded_as_transformers_does(
    client: OpenAI, checkpoint: Path, references: Callable[..., PlainReference]
) -> None:
    images = photographs()
    processor = CLIPImageProcessorPil.from_pretrained(checkpoint)
    pixels = torch.from_numpy(np.asarray(processor(images, return_tensors="np")["pixel_values"]))
    features = references("clip", torch.float32).model.get_image_features(pixel_values=pixels)
    expected = features.pooler_output.detach().numpy()
    urls = [uri(image) for image in images]
    assert error(embedded(client, *urls, extra_body={"normalize": False}), expected) <= TOLERANCE
    assert error(embedded(client, *urls), unit(expected)) <= TOLERANCE
    answer = client.embeddings.create(model="any", input=urls[0], user="me", extra_body={"modality": "image"})
    close(answer.data[0].embedding, unit(expected[0]))
    assert (answer.object, answer.data[0].object, answer.model) == ("list", "embedding", "tiny-clip")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (TOKENS, TOKENS)


def test_base64_and_float_are_equal(client: OpenAI, proxy: RouterProcess) -> None:
    """An image alone is in the same forward each time; others may change its last bits."""
    for url in (picture(seed=1), picture(80, 50, seed=2)):
        decimal = embedded(client, url, encoding_format="float")
        np.testing.assert_array_equal(embedded(client, url), decimal)  # the client asks for base64
        close(np.linalg.norm(decimal, axis=1), 1)
    raw = posted(proxy, {"input": url, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(raw), "<f4"), decimal[0])


def test_vectors_are_cut_to_what_the_model_offers(client: OpenAI, co: cohere.ClientV2) -> None:
    whole = embedded(client, picture(), extra_body={"normalize": False})
    for length in (24, 40):
        cut = embedded(client, picture(), dimensions=length)
        close(cut, unit(whole[:, :length]))
    np.testing.assert_array_equal(embedded(client, picture(), dimensions=WIDTH), embedded(client, picture()))
    with pytest.raises(openai.BadRequestError, match=r"offers 24, 40 \(its matryoshka_dimensions\), got 16") as caught:
        embedded(client, picture(), dimensions=16)
    assert caught.value.param == "dimensions"
    answer = co.embed(model="any", input_type="image", images=[picture()], output_dimension=24)
    np.testing.assert_array_equal(answer.embeddings.float_, embedded(client, picture(), dimensions=24))


def test_a_conversation_has_one_embedding(client: OpenAI, proxy: RouterProcess) -> None:
    answer = posted(proxy, {"model": "any", "messages": [user(picture())[0] | {"content": [part(picture())]}]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"][0]["embedding"] == embedded(client, picture())[0].tolist()
    with pytest.raises(openai.BadRequestError, match=r"messages: a conversation has one embedding.* 2 images"):
        client.post("/embeddings", cast_to=object, body={"messages": [{"content": [part(picture()), part("data:x")]}]})


def test_images_of_a_request_share_forwards(client: OpenAI, server: ServerProcess) -> None:
    """One call for as many as have a turn, which are 24 by default; equal images are encoded once."""

    def counted() -> "npt.NDArray[np.float64]":
        calls = server.metric("vitwire_requests_total", method="EncodeStream")
        return np.array([calls, *(server.metric(f"vitwire_batch_items_{each}") for each in ("sum", "count"))])

    urls = [picture(seed=seed) for seed in range(24)]
    found = []
    for _ in range(5):  # a slow decoder may leave a forward to each image once
        before = counted()
        rows = embedded(client, *urls, *urls[:8])
        calls, items, forwards = counted() - before
        assert (calls, items) == (1, 24)
        found.append(forwards)
    assert min(found) < 24, found
    np.testing.assert_array_equal(rows[24:], rows[:8])
    for url, row in zip(urls[:4], rows[:4], strict=True):  # in whichever forward it was
        close(embedded(client, url)[0], row)


def test_cohere(co: cohere.ClientV2, client: OpenAI) -> None:
    urls = [picture(seed=1), picture(seed=2)]
    expected = embedded(client, *urls)
    answer = co.embed(
        model="any", input_type="image", images=urls, embedding_types=["float", "base64", "binary", "ubinary"]
    )
    found = answer.embeddings
    close(found.float_, expected)
    decoded = [np.frombuffer(base64.b64decode(each), "<f4") for each in found.base64]
    np.testing.assert_array_equal(decoded, np.array(found.float_, np.float32))
    bits = np.unpackbits(np.array(found.ubinary, np.uint8), axis=1)
    np.testing.assert_array_equal(bits, np.array(found.float_) >= 0)
    np.testing.assert_array_equal(np.array(found.binary) + 128, found.ubinary)
    assert (answer.response_type, found.int8, answer.meta.api_version.version) == ("embeddings_by_type", None, "2")
    assert (answer.meta.billed_units.images, answer.meta.billed_units.image_tokens) == (2, 2 * TOKENS)
    inputs = [{"content": [part(url)]} for url in urls]
    again = co.embed(model="any", input_type="search_document", inputs=inputs)
    close(again.embeddings.float_, found.float_)


def test_vectors_of_every_token(checkpoints: Checkpoints) -> None:
    """Without --pooling, as the client library returns them; of rows with deepstack levels, the main part."""
    with serving(checkpoints("qwen3_vl"), *FLAGS) as server, router(server.target, None) as process:
        file = io.BytesIO()
        photographs()[1].save(file, "PNG")
        with Client(server.target) as own:
            embedding = own.encode_images([file.getvalue()])[0]
            assert embedding.levels > 0
        expected = embedding.main
        body = {"input": [picture(), uri(photographs()[1])]}
        decimal = posted(process, body).json()
        assert decimal["data"][1]["shape"] == list(expected.shape)
        close(decimal["data"][1]["embedding"], expected)
        assert decimal["usage"]["prompt_tokens"] == len(decimal["data"][0]["embedding"]) + len(expected)
        binary = posted(process, body | {"encoding_format": "base64"}).json()["data"][1]
        rows = np.frombuffer(base64.b64decode(binary["embedding"]), "<f4").reshape(binary["shape"])
        close(rows, expected)
        with client_of(process) as client:
            (flat,) = client.embeddings.create(model="m", input=uri(photographs()[1])).data
            close(np.reshape(flat.embedding, flat.shape), expected)
            rows = posted(process, body | {"normalize": True}).json()["data"][1]["embedding"]
            close(rows, unit(expected))
            with pytest.raises(
                openai.BadRequestError, match=r"dimensions: .* may not be cut, as they are one per token"
            ):
                embedded(client, picture(), dimensions=8)
        with cohere_of(process) as co, pytest.raises(cohere.BadRequestError, match="one vector per image"):
            co.embed(model="m", input_type="image", images=[picture()])


def test_the_blocks_of_the_document(proxy: RouterProcess, checkpoint: Path, tmp_path: Path) -> None:
    """Each as it is written, in the checkpoint of the test, with a tokenizer that the tiny one lacks."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "clip"))
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "photo": 2, "cat": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<unk>").save_pretrained(folder)
    photographs()[0].save(tmp_path / "photo.jpg")
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, value in {
        "localhost:8080": f"127.0.0.1:{proxy.port}",
        "openai/clip-vit-base-patch32": str(folder),
    }.items():
        text = text.replace(name, value)
    python = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    printed = [_ran(sys.executable, "-c", block + "\n", folder=tmp_path) for block in python[:2]]
    assert printed == [f"2 {WIDTH} {2 * TOKENS}\n", f"{WIDTH} {WIDTH // 8} 1.0\n"]
    (shell,) = (each for each in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if each.startswith("curl"))
    answer = json.loads(_ran("bash", "-euo", "pipefail", "-c", shell, folder=tmp_path))
    assert len(answer["data"][0]["embedding"]) == WIDTH
    check = "\nprint(queries.shape, round(float((queries**2).sum()), 3))"
    assert _ran(sys.executable, "-c", python[2] + check, folder=tmp_path) == f"(1, {WIDTH}) 1.0\n"


def _ran(*command: str, folder: Path) -> str:
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout
