"""How Dynamo's worker starts and ends with Vitwire as its custom encoder, and the connections that it can make."""

import asyncio
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.dynamo_worker import Workers, images_of, prompt
from tests.engines.vllm.image_site import SIZES, data_url, picture

from servers import PYTHON, serving
from vitwire import EncodeFailed, Unauthenticated, Unavailable
from vitwire.integrations import dynamo as adapter

_ISSUE = (
    "import sys; from pathlib import Path; from certificates import Authority; Authority(Path(sys.argv[1])).issue()"
)


def test_models_that_do_not_fit(dynamo_workers: Workers) -> None:
    with pytest.raises(
        ValueError, match=r"does not fit .*model type 'qwen3_vl', expected 'qwen3_5'; embedding width 192"
    ):
        dynamo_workers("qwen3_5")
    with pytest.raises(ValueError, match="does not support this multimodal decoder architecture"):  # Dynamo's
        dynamo_workers("qwen2_vl")


def test_a_server_without_decoders(dynamo_workers: Workers, checkpoint: Path) -> None:
    with (
        serving(checkpoint, "--graphs", "off", "--decode-processes", "0") as server,
        pytest.raises(ValueError, match="prepares no images"),
    ):
        dynamo_workers(VITWIRE_TARGET=server.target)


def test_a_start_without_a_server(dynamo_workers: Workers, monkeypatch: Any) -> None:
    monkeypatch.setattr(adapter, "_START_SECONDS", 1.0)
    with pytest.raises(Unavailable):
        dynamo_workers(VITWIRE_TARGET="127.0.0.1:1")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vision-encoder")]


def test_tokens(dynamo_workers: Workers, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret-token-of-16\n")
    with serving(checkpoint, "--graphs", "off", "--auth-tokens-file", str(tmp_path / "tokens")) as server:
        with pytest.raises(Unauthenticated):
            dynamo_workers(VITWIRE_TARGET=server.target, VITWIRE_TOKEN="wrong")
        dynamo_workers(VITWIRE_TARGET=server.target, VITWIRE_TOKEN="secret-token-of-16")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"VITWIRE_TARGET": "http://host"}, "is a URL"),
        ({"VITWIRE_TLS": "yes"}, "VITWIRE_TLS: expected 0 or 1, got 'yes'"),
        ({"VITWIRE_TIMEOUT": "-1"}, "VITWIRE_TIMEOUT: expected seconds, got '-1'"),
        ({"VITWIRE_TIMEOUT": "0"}, "VITWIRE_TIMEOUT"),
        ({"VITWIRE_TIMEOUT": "nan"}, "VITWIRE_TIMEOUT"),
        ({"VITWIRE_CERT": "client.pem"}, "VITWIRE_CERT and VITWIRE_KEY must be set together"),
    ],
)
def test_wrong_variables(dynamo_workers: Workers, variables: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dynamo_workers(**variables)


async def test_a_worker_that_ends(dynamo_workers: Workers) -> None:
    """The connections are closed, and no thread of the encoder is left."""
    worker = dynamo_workers()
    encoder, image = worker._custom_encoder, data_url(picture(*SIZES[0]))
    await prompt(worker, image)
    encoder.shutdown()
    assert encoder._backend._client.is_closed
    with pytest.raises(RuntimeError, match="before load"):
        await prompt(worker, image)


async def test_a_worker_that_ends_while_it_encodes(dynamo_workers: Workers, checkpoint: Path) -> None:
    with serving(checkpoint, "--graphs", "off") as server:
        worker = dynamo_workers(VITWIRE_TARGET=server.target)
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            calls = [asyncio.create_task(prompt(worker, data_url(picture(*SIZES[0])))) for _ in range(4)]
            await asyncio.sleep(0.5)
            began = time.monotonic()
            await asyncio.to_thread(worker._custom_encoder.shutdown)
            results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
    assert time.monotonic() - began < 5
    assert all(isinstance(each, Exception) and not isinstance(each, ValueError) for each in results), results


async def test_a_server_that_returns_with_another_model(dynamo_workers: Workers, checkpoints: dict[str, Path]) -> None:
    """Its rows never reach vLLM."""
    image = data_url(picture(*SIZES[0]))
    with serving(checkpoints["qwen3_vl"], "--graphs", "off") as server:
        worker = dynamo_workers(VITWIRE_TARGET=server.target)
        await prompt(worker, image)
        port = str(server.port)
    with serving(checkpoints["qwen3_5"], "--graphs", "off", "--port", port):
        for _ in range(3):
            with pytest.raises((EncodeFailed, RuntimeError), match="64"):
                await prompt(worker, image)


@pytest.fixture
def certificates(tmp_path: Path) -> list[str]:
    """Files of root certificate, certificate and key, made in the server's environment."""
    environment = os.environ | {"PYTHONPATH": "tests/support"}
    subprocess.run([PYTHON, "-c", _ISSUE, str(tmp_path)], check=True, env=environment)
    return [str(tmp_path / f"{name}.pem") for name in ("root", "cert", "key")]


async def test_mutual_tls(dynamo_workers: Workers, checkpoint: Path, certificates: list[str]) -> None:
    root, cert, key = certificates
    flags = ("--graphs", "off", "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", root)
    with serving(checkpoint, *flags) as server:
        settings = {"VITWIRE_TARGET": server.target, "VITWIRE_CA": root, "VITWIRE_CERT": cert, "VITWIRE_KEY": key}
        worker = dynamo_workers(**settings)
        assert images_of(await prompt(worker, data_url(picture(*SIZES[0]))))[1] == [[1, 8, 8]]
