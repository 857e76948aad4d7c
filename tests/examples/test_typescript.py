"""The TypeScript example, built by `make example-test`, with Node against servers."""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import skimage
from google.rpc.status_pb2 import Status

from checkpoints import Checkpoints
from fake_service import WIDTH, Running, abort, retry_info, running
from servers import ServerProcess, serving
from vitwire import Client, Item
from vitwire.v1 import encoder_pb2 as pb

__all__ = ["running"]  # the fixture

EXAMPLE = Path(__file__).parents[2] / "examples" / "typescript"
PHOTO = Path(skimage.__file__).parent / "data" / "rocket.jpg"
TOKEN = "a-token-that-is-long-enough"


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(f"{TOKEN} example\n")
    flags = ("--graphs", "simulated", "--budgets", "64,1024", "--cache-bytes", "10000000")
    with serving(checkpoints("qwen3_vl"), *flags, "--auth-tokens-file", str(tokens)) as process:
        yield process


def run(target: str, *arguments: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    command = ["node", "dist/encode.js", "--target", f"http://{target}", *arguments]
    environment = os.environ | {"VITWIRE_TOKEN": token}
    return subprocess.run(
        command, cwd=EXAMPLE, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_random_picture(server: ServerProcess) -> None:
    ran = run(server.target)
    assert (ran.returncode, ran.stderr) == (0, "")
    model, item = ran.stdout.splitlines()
    width = re.fullmatch(r"tiny-qwen3_vl \(qwen3_vl\), width (\d+)", model)
    assert width
    assert re.fullmatch(rf"noise: 64 x {width[1]}, path GRAPH, tokens 64, \[(-?\d+\.\d{{4}} ){{4}}\.\.\.\]", item)


def test_photographs(server: ServerProcess) -> None:
    """The same rows as the Python client's, which the second call finds in the cache."""
    with Client(server.target, token=TOKEN) as client:
        (expected,) = client.encode([Item.from_file(PHOTO)], output_type="float32")
    for path in ("GRAPH|CACHE", "CACHE"):
        ran = run(server.target, str(PHOTO), str(PHOTO))
        assert (ran.returncode, ran.stderr) == (0, "")
        shape, first = "{} x {}".format(*expected.shape), " ".join(f"{x:.4f}" for x in expected.numpy()[0, :4])
        line = rf"{PHOTO}: {shape}, path ({path}), tokens {expected.shape[0]}, \[{first} \.\.\.\]"
        assert all(re.fullmatch(line, each) for each in ran.stdout.splitlines()[1:]), ran.stdout
        assert len(ran.stdout.splitlines()) == 3


@pytest.mark.parametrize("token", ["", "another-token-of-the-same-length"])
def test_without_the_token(server: ServerProcess, token: str) -> None:
    ran = run(server.target, token=token)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert re.match("Unauthenticated: .*token", ran.stderr)


def test_the_deadline(running: Running) -> None:
    running.fake.before = lambda _: time.sleep(3)
    ran = run(running.target, "--timeout", "1")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("DeadlineExceeded: ")


def test_a_server_that_is_gone() -> None:
    ran = run("127.0.0.1:9", "--timeout", "5")
    assert ran.returncode == 1
    assert ran.stderr.startswith("Unavailable: ")


def test_a_full_server_is_asked_again(running: Running) -> None:
    def full(context: grpc.ServicerContext) -> None:
        if running.fake.methods.count("Encode") == 1:
            abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, retry_info(0, 50_000_000))

    running.fake.before = full
    ran = run(running.target)
    assert (ran.returncode, running.fake.methods.count("Encode")) == (0, 2)
    assert ran.stderr == "retrying in 50 ms: [resource_exhausted] as asked\n"
    assert f"noise: 64 x {WIDTH}, " in ran.stdout


def test_refused_items_are_sent_again(running: Running) -> None:
    def refused(responses: Iterator[Any]) -> Iterator[Any]:
        if running.fake.methods.count("Encode") > 1:
            yield from responses
            return
        status = Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="the queue is full")
        status.details.add().Pack(retry_info(0, 20_000_000))
        yield pb.EncodeResponse(item=0, error=status)

    running.fake.bend = refused
    ran = run(running.target)
    assert (ran.returncode, ran.stderr) == (0, "retrying in 20 ms: item 0: the queue is full\n")
