"""Requests for embeddings: which ones are an engine's."""

import json

import pytest

from vitwire_gateway.embeddings.embedding_requests import openai_request
from vitwire_gateway.requests.image_sources import Limits

LIMITS = Limits(4, 1 << 20)
PART = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
BODY = json.dumps({"messages": [{"role": "user", "content": [PART]}]})


@pytest.mark.parametrize("body", [BODY.encode(), BODY.replace("image", "\\u0069mage").encode(), BODY.encode("utf-16")])
def test_images_are_not_the_engines_however_they_are_written(body: bytes) -> None:
    """It would fetch their URLs."""
    found = openai_request(body, LIMITS, has_engine=True)
    assert found is not None
    assert found.images.sources[0].content == PART["image_url"]["url"]


@pytest.mark.parametrize("body", [b'{"input": "caf\\u00e9"}', b'{"input": [1, 2]}', b"not JSON"])
def test_texts_are_the_engines(body: bytes) -> None:
    assert openai_request(body, LIMITS, has_engine=True) is None
