"""`vitwire parity` between `vllm serve` with vLLM's own tower, and with our connector and a real encoder."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.engines.vllm.hooked import served
from tests.engines.vllm.image_site import awkward, picture, saved

from servers import PYTHON, ServerProcess

Json = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    photo, folder = Image.open(BytesIO(picture(130, 70))), tmp_path_factory.mktemp("files")
    more = {
        "16 bits": saved(Image.fromarray(np.asarray(photo.convert("L"), np.uint16) * 257), "PNG"),
        "grey alpha": saved(photo.convert("LA"), "PNG"),
        "animated": saved(photo, "GIF", save_all=True, append_images=[photo.rotate(90)]),
        "longest": saved(photo.resize((600, 3)), "PNG"),
        "truncated": picture(640, 480)[:9000],
        "TIFF": saved(photo, "TIFF"),
    }
    for name, content in (awkward() | more).items():
        (folder / f"{name}.jpg").write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def start(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Starts an engine; returns its URL."""
    path = tmp_path_factory.mktemp("installed")
    with ExitStack() as stack:
        yield (
            lambda target="", **flags: stack.enter_context(served(checkpoint, target, path, tower="vllm", **flags)).url
        )


def compared(folder: Path, engine: str, with_encoder: str, code: int) -> Json:
    words = ["parity", "--engine", engine, "--with-encoder", with_encoder, "--images", str(folder)]
    command = [PYTHON, "-c", "from vitwire_cli import main; main()", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_an_encoder_and_the_tower_agree(start: Callable[..., str], folder: Path, server: ServerProcess) -> None:
    """About all files, up to rounding; and another size of images is found."""
    tower, encoder = start(), start(server.target)
    document = compared(folder, tower, encoder, 0)
    rows = {row["file"].removesuffix(".jpg"): row for row in document["files"]}
    outcomes = dict.fromkeys(rows, "accepted") | {"truncated": "accepted, refused", "TIFF": "format"}
    assert {name: row["encoder"] for name, row in rows.items()} == outcomes
    assert rows.pop("truncated")["status"] == [400, 400]
    for name, row in rows.items():
        assert row["status"] == [200, 200]
        assert len(set(row["prompt_tokens"])) == 1 < row["prompt_tokens"][0]
        assert row["control"] == 0 <= row["difference"] < 0.15, name
        assert (row["difference"] > 0) == (name != "TIFF"), "two implementations, and one of them twice"
    assert (document["answered"], document["encoded"], document["differing"]) == (len(rows), len(rows) - 1, 0)
    document = compared(folder, start(mm_processor_kwargs='{"max_pixels": 4096}'), encoder, 1)
    assert 0 < document["differing"] < len(rows)
    for place, row in enumerate(document["files"]):
        assert ("prompt" in row["differs"]) == (place < document["differing"]), row
    assert "connector too" in compared(folder, encoder, tower, 2)["error"]
