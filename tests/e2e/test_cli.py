"""The `vitwire` command against a real server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import skimage
from safetensors.numpy import load_file

from conftest import Checkpoints
from reference import TOLERANCE, error
from servers import ServerProcess, serving
from vitwire import Client, Embedding, InvalidItem, Item

VITWIRE = Path(sys.executable).with_name("vitwire")
HOPPER = Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg"
COFFEE = Path(skimage.__file__).parent / "data" / "coffee.png"


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints) -> Iterator[ServerProcess]:
    with serving(checkpoints("qwen2_5_vl"), "--dtype", "float32") as process:
        yield process


def vitwire(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([VITWIRE, *map(str, words)], capture_output=True, text=True, timeout=120, check=False)


def test_encode_writes_what_the_client_gets(server: ServerProcess, tmp_path: Path) -> None:
    out = tmp_path / "rows.safetensors"
    done = vitwire("encode", HOPPER, COFFEE, "--target", server.target, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert len(document["items"]) == 2
    with Client(server.target) as client:
        expected = client.encode_images([HOPPER, COFFEE])
    rows = load_file(out)
    assert list(rows) == ["coffee.png", "grace_hopper.jpg"]
    assert error(rows["grace_hopper.jpg"], expected[0].numpy()) <= TOLERANCE
    assert error(rows["coffee.png"], expected[1].numpy()) <= TOLERANCE
    single = tmp_path / "one.npy"
    assert vitwire("encode", COFFEE, "--target", server.target, "--out", single).returncode == 0
    assert np.load(single).shape == expected[1].shape


def test_info_and_health(server: ServerProcess) -> None:
    done = vitwire("info", "--target", server.target, "--json")
    assert json.loads(done.stdout.splitlines()[-1])["model_type"] == "qwen2_5_vl"
    assert vitwire("health", "--target", server.target).returncode == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["encode", "/nowhere.png"], "/nowhere.png"),
        (["encode", __file__], "test_cli.py"),
        (["health", "no.such.Service"], "SERVICE_UNKNOWN"),
    ],
)
def test_mistakes_are_told_in_a_line(server: ServerProcess, words: list[str], told: str) -> None:
    done = vitwire(*words, "--target", server.target)
    assert done.returncode == 1
    assert told in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_a_broken_file_does_not_lose_the_others(server: ServerProcess, tmp_path: Path) -> None:
    out = tmp_path / "rows.safetensors"
    done = vitwire("encode", HOPPER, __file__, COFFEE, "--target", server.target, "--out", out)
    assert done.returncode == 1
    assert "test_cli.py" in done.stderr
    assert list(load_file(out)) == ["coffee.png", "grace_hopper.jpg"]


def test_an_item_that_the_service_finds_invalid_fails_alone(server: ServerProcess) -> None:
    """As `encode` asks for it: the request is a stream, though one message would hold it."""
    good, odd = (Item(np.zeros((2 * height, 3 * 2 * 14 * 14), np.float32), (1, height, 2)) for height in (4, 3))
    with Client(server.target) as client:
        with pytest.raises(InvalidItem):
            list(client.iter_encode([good, odd]))
        results = dict(client.iter_encode([good, odd], return_exceptions=True))
    assert isinstance(results[0], Embedding)
    assert isinstance(results[1], InvalidItem)


def test_bench_with_a_plot(server: ServerProcess, tmp_path: Path) -> None:
    plot = tmp_path / "latency.svg"
    sizes = ("--size", "56x56", "--size", "112x56")
    done = vitwire("bench", *sizes, "--requests", "4", "--target", server.target, "--plot", plot)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["items"] == 4
    assert plot.read_text().startswith("<?xml")
