"""`vitwire router` between the real openai client, a real server and a stand-in engine."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import skimage
import torch
from openai import OpenAI

from checkpoints import Checkpoints
from engine import WORDS
from routers import EngineProcess, RouterProcess, engine, router
from servers import ServerProcess, serving
from vitwire import Client

HOPPER = Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg"
COFFEE = Path(skimage.__file__).parent / "data" / "coffee.png"
Json = dict[str, Any]


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints) -> Iterator[ServerProcess]:
    with serving(checkpoints("qwen3_vl"), "--cache-bytes", "100000000") as process:
        yield process


@pytest.fixture(scope="module")
def stand_in() -> Iterator[EngineProcess]:
    with engine() as process:
        yield process


@pytest.fixture(scope="module")
def proxy(server: ServerProcess, stand_in: EngineProcess) -> Iterator[RouterProcess]:
    with router(server.target, stand_in.url) as process:
        yield process


@pytest.fixture
def llm(proxy: RouterProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{proxy.url}/v1", api_key="sk-caller", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def received(stand_in: EngineProcess) -> EngineProcess:
    """The engine, with nothing recorded."""
    stand_in.requests()
    return stand_in


def data_uri(file: Path | bytes) -> str:
    content = file if isinstance(file, bytes) else file.read_bytes()
    return "data:image/jpeg;base64," + base64.b64encode(content).decode()


def image(url: str, **fields: str) -> Json:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def user(*parts: Json) -> list[Any]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": list(parts)}]


def decoded(value: str) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(io.BytesIO(base64.b64decode(value)), weights_only=True)
    return tensor


def test_text_passes_as_it_is(llm: OpenAI, received: EngineProcess) -> None:
    answer = llm.chat.completions.create(
        model="tiny", messages=user(text("Hello")), temperature=0.5, extra_body={"unknown": [1.5, None]}
    )
    assert answer.choices[0].message.content == "".join(WORDS)
    (request,) = received.requests()
    assert request["body"] == {
        "model": "tiny", "messages": user(text("Hello")), "temperature": 0.5, "unknown": [1.5, None],
    }  # fmt: skip
    assert request["headers"]["authorization"] == "Bearer sk-caller"


def test_images_become_embeddings(llm: OpenAI, received: EngineProcess, server: ServerProcess) -> None:
    messages = user(
        text("Compare"), image(data_uri(HOPPER), detail="high"), text("with"), image(data_uri(COFFEE)),
        image(data_uri(HOPPER)) | {"cache_control": {"type": "ephemeral"}}, text("please"),
    )  # fmt: skip
    answer = llm.chat.completions.create(model="tiny", messages=messages, seed=7)
    assert answer.choices[0].message.content == "".join(WORDS)
    (request,) = received.requests()
    assert request["body"]["seed"] == 7
    assert request["body"]["messages"][0] == messages[0]
    parts = request["body"]["messages"][1]["content"]
    assert [part["type"] for part in parts] == ["text", "image_embeds", "text", "image_embeds", "image_embeds", "text"]
    assert [parts[0], parts[2], parts[5]] == [text("Compare"), text("with"), text("please")]
    assert parts[4] == parts[1] | {"cache_control": {"type": "ephemeral"}}
    with Client(server.target) as client:
        expected = client.encode_images([HOPPER, COFFEE])
    for part, embedding in zip((parts[1], parts[3]), expected, strict=True):
        rows = decoded(part["image_embeds"]["image_embeds"])
        assert torch.equal(rows, embedding.torch())
        assert decoded(part["image_embeds"]["image_grid_thw"]).tolist() == list(embedding.grid)
    assert parts[1]["uuid"] != parts[3]["uuid"]


def test_a_stream_arrives_piece_by_piece(llm: OpenAI, stand_in: EngineProcess) -> None:
    messages = user(text("What is this?"), image(data_uri(COFFEE)))
    with llm.chat.completions.create(model="slow", messages=messages, stream=True) as stream:
        assert next(stream).choices[0].delta.content == WORDS[0]
        stand_in.test("continue")  # only now does the engine send the rest
        assert [chunk.choices[0].delta.content for chunk in stream] == WORDS[1:]
