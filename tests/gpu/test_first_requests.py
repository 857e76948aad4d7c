"""A server with a decoder on its device loads no library and compiles no kernel for the first requests.

`tests/e2e/test_first_requests.py` does it on a CPU. Compilers are processes, and what loads a kernel is imported.
"""

import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from first_uses import noted
from servers import serving
from vitwire import Client

pytest.importorskip("nvidia.nvimgcodec")


def test_all_is_there_when_it_is_ready(
    checkpoints: Callable[[str], Path], device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = Image.fromarray(np.random.default_rng(0).integers(0, 256, (900, 800, 3), np.uint8))
    files = []
    for kind in ("JPEG", "PNG", "WEBP"):
        with BytesIO() as file:
            drawn.save(file, kind)
            files.append(file.getvalue())
    environment = dict(os.environ)
    flags = ("--device", str(device), "--decode", "device", "--prepare", "device", "--budgets", "64,256,1024")
    with noted(tmp_path, environment) as found:
        monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
        with serving(checkpoints("qwen3_vl"), *flags) as server, Client(server.target) as client:
            client.model()
            found.watch()
            assert found.processes > 1, "the server and its decoders"
            for each in files:
                client.encode_images([each])
            client.encode_images([np.asarray(drawn)])
            assert found.events == []
            assert server.metric("vitwire_prepare_seconds_count", where="device", stage="decode") == 1
