"""A server that is ready starts no process and imports no module for the first requests."""

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import Checkpoints
from encoded_files import clip, moving, photograph, saved, turned
from first_uses import noted
from servers import serving
from vitwire import Client, Item

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="decoders need Linux")
FLAGS: Mapping[str, tuple[str, ...]] = {
    "one process": ("--decode-processes", "2"),
    "two edges": ("--rpc-processes", "2"),
    "on a device": ("--decode", "device", "--prepare", "device"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] if name != "on a device" else []) for name in FLAGS]
)
def test_all_is_there_when_it_is_ready(
    name: str, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(os.environ)
    with noted(tmp_path, environment) as found:
        monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
        model = checkpoints("qwen2_vl")
        with serving(model, *FLAGS[name]) as server, Client(server.target) as client:
            client.model()
            found.watch()
            photo, large = photograph(90, 120), photograph(800, 660)
            assert found.processes > 1, "the server and its decoders"
            files = [saved(large, "JPEG"), *(saved(photo, kind) for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP"))]
            files += [saved(photo, "JPEG", progressive=True), turned("JPEG"), turned("PNG"), turned("WEBP")]
            for file in files:
                client.encode_images([file])
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda file: client.encode_images([file]), files[1:] * 3))
            client.encode([Item.from_file(clip(moving(12)))])
            client.encode_images([np.asarray(photo)])
            client.encode_clips([np.stack([np.asarray(photograph())] * 4)])
            client.encode([Item(np.ones((16, 3 * 2 * 14 * 14), np.float32), (1, 4, 4))])
            assert found.events == []
            on_device = server.metric("vitwire_prepare_seconds_count", where="device", stage="decode")
            assert (on_device > 0) == (name == "on a device")


def test_what_a_running_process_does_is_noted(tmp_path: Path) -> None:
    """The test above would see what it looks for."""
    environment = dict(os.environ)
    with noted(tmp_path, environment) as found:
        code = "import sys; print(); input(); import colorsys"
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", code], env=environment, **streams) as process:
            assert process.stdout
            assert process.stdout.readline()
            assert found.events == []
            found.watch()
            process.communicate("\n")
        assert f"{process.pid} import colorsys" in found.events
