"""Requests for embeddings of images to a router, and photographs."""

import base64
import io
from typing import Any

import cohere
import httpx2
import numpy as np
from openai import OpenAI
from PIL import Image
from skimage import data

from reference import TOLERANCE
from routers import RouterProcess

EMBEDDINGS = "/v1/embeddings"
NO_TEXT = "Vitwire embeds images, no text: use the text encoder of the same checkpoint"
FLAGS = ("--dtype", "float32", "--graphs", "simulated")
"""Of servers."""
Json = dict[str, Any]


def uri(image: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def photographs() -> list[Image.Image]:
    examples: Any = data  # without types
    found = [Image.fromarray(each()) for each in (examples.astronaut, examples.coffee, examples.chelsea)]
    return [*found, found[0].crop((0, 100, 512, 220)), found[1].resize((40, 30))]


def close(rows: Any, expected: Any) -> None:
    """Rows of another forward, whose order of additions in float32 may differ."""
    np.testing.assert_allclose(rows, expected, atol=TOLERANCE * max(1.0, np.abs(expected).max()))


def unit(rows: Any) -> Any:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def embedded(client: OpenAI, *urls: str, **options: Any) -> Any:
    answer = client.embeddings.create(model="any", input=list(urls), **options)
    assert [each.index for each in answer.data] == list(range(len(urls)))
    return np.array([each.embedding for each in answer.data], np.float32)


def cohere_of(proxy: RouterProcess, key: str = "sk-caller") -> cohere.ClientV2:
    """Cohere's client; a context manager."""
    return cohere.ClientV2(key, base_url=proxy.url, max_retries=0, timeout=60)


def posted(proxy: RouterProcess, body: Json, path: str = EMBEDDINGS) -> Any:
    return httpx2.post(proxy.url + path, json=body, timeout=60)


def part(url: str) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}
