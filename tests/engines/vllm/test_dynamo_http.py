"""The answers of Dynamo's frontend to requests with images that Vitwire encodes. An engine is not part of this."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests
from tests.engines.vllm.image_site import data_url, picture

from entered import entered
from servers import ServerProcess, end, serving
from vitwire import Client

GOOD = data_url(picture(64, 64))
SECONDS = 90
Ask = Callable[..., requests.Response]

encoder = entered(lambda checkpoint: serving(checkpoint, "--graphs", "off", "--dtype", "bfloat16"))


@pytest.fixture(scope="module")
def ask(encoder: ServerProcess, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Sends a chat completion with an image to Dynamo's frontend, which has one worker."""
    folder = tmp_path_factory.mktemp("dynamo")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"VITWIRE_TARGET": encoder.target, "VITWIRE_TIMEOUT": "3", "DYN_FILE_KV": str(folder)}
    frontend = ["--discovery-backend", "file", "--http-host", "127.0.0.1", "--http-port", str(port)]
    programs = (["tests.engines.vllm.dynamo_worker", str(checkpoint)], ["dynamo.frontend", *frontend])
    with ExitStack() as stack, requests.Session() as session:
        for number, program in enumerate(programs):
            log = stack.enter_context((folder / f"{number}.log").open("wb"))
            command = [sys.executable, "-m", *program]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(end, process, 10)

        def asked(*urls: str) -> requests.Response:
            parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
            body = {"model": "tiny", "max_tokens": 8, "messages": messages}
            return session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60)

        deadline = time.monotonic() + SECONDS
        while not is_ready(asked):
            assert time.monotonic() < deadline, [each.read_text()[-2000:] for each in folder.glob("*.log")]
            time.sleep(0.2)
        yield asked


def is_ready(asked: Ask) -> bool:
    try:
        return asked().ok
    except requests.ConnectionError:
        return False


def content(answer: requests.Response) -> str:
    """What the assistant says: the number of vectors."""
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_images_are_encoded(ask: Ask, encoder: ServerProcess) -> None:
    files = [picture(64, 64), picture(64, 128), picture(200, 120, "PNG")]
    with Client(encoder.target) as client:
        expected = sum(embedding.shape[0] for embedding in client.encode_images(files))
    assert content(ask(*map(data_url, files))) == str(expected)
    assert content(ask(GOOD)) == "16"
    assert content(ask()) == "0"


def test_the_caller_learns_what_is_wrong_with_an_image(ask: Ask) -> None:
    answer = ask(GOOD, data_url(b"nonsense" * 100))
    assert answer.status_code == 400
    assert "is not a JPEG, PNG, WebP" in answer.json()["message"]


@pytest.mark.parametrize("url", ["file:///etc/hostname", "https://127.0.0.1/a.jpg", "http://example.com/a.jpg"])
def test_urls_that_dynamo_refuses(ask: Ask, url: str) -> None:
    answer = ask(url)
    assert (answer.status_code, answer.json()["message"]) == (400, "Invalid request")


def test_a_late_and_a_lost_encoder(ask: Ask, encoder: ServerProcess) -> None:
    """504 and 503, and the worker goes on with requests that have no images. Comes last, as it ends the encoder."""
    os.kill(encoder.process.pid, signal.SIGSTOP)
    try:
        assert ask(GOOD).status_code == 504
        assert content(ask()) == "0"
    finally:
        os.kill(encoder.process.pid, signal.SIGCONT)
    assert content(ask(GOOD)) == "16"
    encoder.stop()
    assert ask(GOOD).status_code == 503
    assert content(ask()) == "0"
