"""Requests for embeddings that a router refuses, passes to its engine or limits, and callers that leave."""

import base64
import gzip
import io
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import cohere
import httpx2
import numpy as np
import openai
import psutil
import pytest
from openai import OpenAI

from embedding_calls import EMBEDDINGS, FLAGS, NO_TEXT, Json, close, cohere_of, embedded, part, photographs, posted, uri
from entered import entered
from routers import EngineProcess, RouterProcess, client_of, leaving, picture, router, serving_file, user
from servers import ServerProcess, serving
from waiting import until

server = entered(lambda checkpoints: serving(checkpoints("clip"), *FLAGS, "--pooling", "cls"))
beside = entered(lambda server, stand_in: router(server.target, stand_in.url))
"""A router with an engine."""


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"input": "a cat"}, "input", NO_TEXT),
        ({"input": [picture(), "a cat"]}, "input[1]", NO_TEXT),
        ({"input": [[1, 2, 3]]}, "input[0]", NO_TEXT),
        ({"input": []}, "input", "there are no images"),
        ({}, "input", "input is missing: expected a data URI"),
        ({"input": "a cat", "modality": "text"}, "modality", NO_TEXT),
        ({"messages": user(picture())}, "messages[0].content[0]", NO_TEXT),
        ({"messages": [{"content": "a cat"}]}, "messages[0].content", NO_TEXT),
        ({"messages": [{"content": [{"type": "image_url", "image_url": {}}]}]}, None, "expected a string"),
        ({"messages": 5}, "messages", "0 images"),
        ({"input": picture(), "dimensions": 0}, "dimensions", "positive integer"),
        ({"input": picture(), "dimensions": True}, "dimensions", "positive integer"),
        ({"input": picture(), "dimensions": 10**30}, "dimensions", "positive integer"),
        ({"input": picture(), "encoding_format": "hex"}, "encoding_format", "expected float or base64"),
        ({"input": picture(), "encoding_format": []}, "encoding_format", "expected float or base64"),
        ({"input": picture(), "normalize": 1}, "normalize", "true or false"),
        ({"input": picture(), "errors": "none"}, "errors", "expected request or item"),
        ({"input": ["a cat", picture()], "errors": "item"}, "input[0]", NO_TEXT),
        ({"input": picture(), "embed_dtype": "float16"}, "embed_dtype", "float32"),
        ({"input": [picture(), "data:image/png;base64,!!!!"]}, "input[1]", "invalid base64"),
        ({"input": [picture(), "data:image/png;base64,QUJD"]}, "input[1]", "not a JPEG"),
        (
            {"input": [picture(seed=number) for number in range(33)]},
            "input",
            "33 images, the limit is 32 (--max-images or VITWIRE_ROUTER_MAX_IMAGES)",
        ),
        ({"input": "https://example.org/cat.jpg"}, "input", "no URLs are fetched"),
        ({"input": "upload:cat"}, "input", NO_TEXT),
        ({"input": picture().partition(",")[2]}, "input", "is base64 without its head: write data:image/jpeg;base64,"),
        ({"input": "file:///etc/passwd"}, "input", NO_TEXT),
    ],
)
def test_errors_name_the_field(proxy: RouterProcess, body: Json, param: str | None, reason: str) -> None:
    answer = posted(proxy, body)
    found = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert reason in found["message"]
    assert param in (None, found["param"])


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"texts": ["a cat"]}, "texts", NO_TEXT),
        ({}, "images", "either `images` or `inputs`"),
        ({"images": [picture()], "inputs": [{"content": [part(picture())]}]}, "images", "either"),
        ({"images": picture()}, "images", "expected a list"),
        ({"images": [5]}, "images[0]", "expected a data URI"),
        ({"inputs": [{"content": [part(picture()), {"type": "text", "text": "t"}]}]}, "inputs[0].content[1]", NO_TEXT),
        ({"inputs": [{"content": [part(picture())] * 2}]}, "inputs[0].content", "2 images"),
        ({"inputs": [{"content": []}]}, "inputs[0].content", "expected"),
        ({"inputs": ["x"]}, "inputs[0].content", "expected"),
        ({"inputs": [{"content": [part("data:x")]}]}, "inputs[0].content[0].image_url", "expected data:"),
        ({"images": [picture()], "embedding_types": ["int8"]}, "embedding_types", "calibrates"),
        ({"images": [picture()], "embedding_types": ["hex"]}, "embedding_types", "expected float"),
        ({"images": [picture()], "embedding_types": "float"}, "embedding_types", "list of strings"),
        ({"images": [picture()], "output_dimension": -1}, "output_dimension", "positive integer"),
        ({"images": [picture()], "output_dimension": 1536}, "output_dimension", "have 48 columns and may not be cut"),
    ],
)
def test_errors_of_cohere_name_the_field(proxy: RouterProcess, body: Json, param: str, reason: str) -> None:
    answer = posted(proxy, body, "/v2/embed")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert reason in answer.json()["error"]["message"]


def test_a_bad_image_leaves_others_alone(client: OpenAI) -> None:
    """Also one that only the encoder finds broken, in a call with others."""
    file = io.BytesIO()
    photographs()[0].save(file, "JPEG")
    broken = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()[:9000]).decode()
    urls = [picture(seed=seed) for seed in range(8)]

    def one(number: int) -> Any:
        if number % 2:
            with pytest.raises(openai.BadRequestError) as caught:
                embedded(client, *urls[:5], broken, *urls[5:])
            return caught.value.param
        return len(embedded(client, *urls))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(16))) == [8, "input[5]"] * 8
    bad = {
        2: broken,
        5: broken,
        6: "data:image/png;base64,QUJD",
        9: "data:image/png;base64,!!!!",
        11: "https://h/x.jpg",
    }
    codes = ["invalid_image"] * 3 + ["invalid_base64", "image_url_refused"]
    mixed = [bad.get(number, picture(seed=number)) for number in range(32)]
    good = [number for number in range(32) if number not in bad]
    expected = embedded(client, *(mixed[each] for each in good))
    for form in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="m", input=mixed, **form, extra_body={"errors": "item"})
        errors = {each.index: each.error for each in answer.data if each.embedding is None}
        assert {number: each["code"] for number, each in errors.items()} == dict(zip(bad, codes, strict=True))
        assert all(each["message"].startswith(f"input[{number}]: ") for number, each in errors.items())
        close([answer.data[each].embedding for each in good], expected)
        assert answer.usage.total_tokens == 16 * len(good)


@pytest.mark.parametrize("url", [
    "data:image/png;base64,!" + "A" * (12 << 20),
    pytest.param(
        "data:image/jpeg;base64," + base64.b64encode(b"\xff\xd8\xff" + bytes(9 << 20)).decode(),
        marks=pytest.mark.matrix,
    ),
], ids=["base64", "image"])  # fmt: skip
def test_what_is_refused_is_freed(url: str, server: ServerProcess) -> None:
    """By the router and by its workers, without a collection of garbage: in cycles it would stay, and not count."""
    with router(server.target, None) as proxy:
        held = []
        for _ in range(10):
            assert posted(proxy, {"input": url}).status_code == 400
            process = psutil.Process(proxy.process.pid)
            held.append(sum(each.memory_info().rss for each in (process, *process.children(recursive=True))))
        assert held[-1] - held[2] < 80 << 20, held


def test_without_an_engine(client: OpenAI, proxy: RouterProcess) -> None:
    with pytest.raises(openai.NotFoundError, match="an engine, and there is none here, only /v1/embeddings "):
        client.chat.completions.create(model="m", messages=user(picture()))
    assert [(each.id, each.object) for each in client.models.list()] == [("tiny-clip", "model")]
    with pytest.raises(openai.NotFoundError, match="the model 'a/b' does not exist") as caught:
        client.models.retrieve("a/b")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with closing(HTTPConnection("127.0.0.1", proxy.port, timeout=60)) as whole:
        whole.request("GET", f"{proxy.url}/v1/models")  # the form of proxies
        assert json.load(whole.getresponse())["error"]["code"] == "unknown_path"
    described = httpx2.get(f"{proxy.url}/openapi.json", timeout=60).json()
    for path, methods in described["paths"].items():
        (method,) = methods
        assert httpx2.request(method, proxy.url + path.format(model="tiny-clip"), timeout=60).status_code == (
            400 if method == "post" else 200
        )
    status, health = proxy.page("/health")
    assert (status, json.loads(health)) == (200, {"status": "ready", "encoder": "SERVING"})
    for path in (EMBEDDINGS, "/v2/embed"):
        assert httpx2.get(proxy.url + path, timeout=60).status_code == 405
        compressed = httpx2.post(proxy.url + path, content=b"", headers={"content-encoding": "gzip"}, timeout=60)
        assert compressed.status_code == 415
    embedded(client, picture())
    assert proxy.metric("vitwire_router_requests_total", route="embeddings", code="200") >= 1
    assert proxy.metric("vitwire_router_requests_total", route="embeddings", code="405") == 2
    assert proxy.metric("vitwire_router_images_total", source="data", result="loaded") >= 1


TEXTS: list[Json] = [
    {"input": "an image of a cat"},
    {"input": ["https://example.org/image.jpg"]},
    {"input": [[1, 2, 3], [4]], "model": "image"},
    {"input": "data about text", "modality": "text"},
    {"input": 5, "user": "image"},
    {"messages": user(picture())},
    {"messages": [{"role": "user", "content": "an image"}]},
]


def test_texts_reach_the_engine(beside: RouterProcess, received: EngineProcess) -> None:
    for body in TEXTS:
        content = json.dumps(body, indent=3).encode()
        answer = httpx2.post(beside.url + EMBEDDINGS, content=content, headers={"x-mine": "1"}, timeout=60)
        assert (answer.status_code, answer.content) == (200, content), "as it is"
        (request,) = received.requests()
        assert (request["path"], request["body"], request["headers"]["x-mine"]) == (EMBEDDINGS, content.decode(), "1")
    squeezed = gzip.compress(json.dumps(TEXTS[0]).encode())
    found = httpx2.post(beside.url + EMBEDDINGS, content=squeezed, headers={"content-encoding": "gzip"}, timeout=60)
    assert (found.status_code, httpx2.get(beside.url + EMBEDDINGS, timeout=60).status_code) == (415, 200)
    assert [each["method"] for each in received.requests()] == ["GET"], "what cannot be read is not passed on"
    long = json.dumps({"input": ["an image " * 20_000]}).encode()
    assert httpx2.post(beside.url + EMBEDDINGS, content=long, timeout=60).content == long


def test_images_beside_an_engine(beside: RouterProcess, received: EngineProcess, client: OpenAI) -> None:
    expected = embedded(client, picture())
    with client_of(beside) as own:
        np.testing.assert_array_equal(embedded(own, picture()), expected)
        with pytest.raises(openai.BadRequestError, match="no URLs are fetched without"):
            embedded(own, "https://example.org/cat.jpg", extra_body={"modality": "image"})
        with pytest.raises(openai.BadRequestError, match=r"input\[1\]: .*embeds images, no text"):
            embedded(own, picture(), "a cat")
    answer = posted(beside, {"messages": [{"role": "user", "content": [part(picture())]}]})
    assert answer.json()["data"][0]["embedding"] == expected[0].tolist()
    with cohere_of(beside) as co:
        answer = co.embed(model="m", input_type="image", images=[picture()])
    np.testing.assert_array_equal(answer.embeddings.float_, expected)
    assert received.requests() == []


def test_keys_hosts_and_limits(server: ServerProcess, tmp_path: Path) -> None:
    file = io.BytesIO()
    photographs()[2].save(file, "JPEG")
    keys = tmp_path / "keys"
    keys.write_text("sk-good\n")
    with serving_file(file.getvalue()) as port:
        allowed = ("--allow-image-host", f"localhost:{port}")
        limits = ("--api-keys-file", str(keys), "--max-buffered-bytes", "400000")
        host = f"http://localhost:{port}/cat.jpg"
        with router(server.target, None, *allowed, *limits) as process, client_of(process, "sk-good") as good:
            with client_of(process) as bad, pytest.raises(openai.AuthenticationError):
                embedded(bad, picture())
            with cohere_of(process) as co, pytest.raises(cohere.UnauthorizedError):
                co.embed(model="m", input_type="image", images=[picture()])
            with pytest.raises(openai.BadRequestError, match="no public address") as refused:
                embedded(good, picture(), host)
            assert (refused.value.code, refused.value.param) == ("image_url_refused", "input[1]")
            with pytest.raises(openai.BadRequestError, match=r"may not be fetched from 169\.254\.169\.254:80"):
                embedded(good, "http://169.254.169.254/latest/meta-data")
            with pytest.raises(openai.RateLimitError):
                embedded(good, *[picture(128, 128, seed=seed) for seed in range(8)])
            assert len(embedded(good, picture())) == 1
        network = ("--allow-image-network", "127.0.0.0/8", "--allow-image-network", "::1/128")
        with router(server.target, None, *allowed, *network) as process, client_of(process) as good:
            np.testing.assert_array_equal(embedded(good, host), embedded(good, uri(photographs()[2], "JPEG")))


def test_a_caller_that_leaves_cancels_its_images(server: ServerProcess, proxy: RouterProcess, client: OpenAI) -> None:
    """The encoder is stopped, so that nothing else would end the request."""
    embedded(client, picture())
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        with leaving(proxy, {"input": [picture(seed=seed) for seed in range(8)]}, EMBEDDINGS):
            until(lambda: proxy.metric("vitwire_router_inflight_requests") == 1)
        until(lambda: proxy.metric("vitwire_router_cancelled_total", stage="images") == 1)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert proxy.metric("vitwire_router_inflight_requests") == 0
    assert len(embedded(client, picture())) == 1
