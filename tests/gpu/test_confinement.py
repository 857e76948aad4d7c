"""The decoder on a GPU, once it runs: what it may not do, and that it still decodes pictures of any size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("nvidia.nvimgcodec")

import confined_children


def test_acts_are_refused(device: torch.device, tmp_path: Path) -> None:
    program = [sys.executable, confined_children.__file__, str(tmp_path), f"device:{device}"]
    cache = os.environ.get("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": cache}
    ran = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    acts = found["device"]["acts"]
    refused = {act: made for act, made in acts.items() if made not in ("EPERM", "ENOSYS")}
    assert refused.keys() <= ({"become root"} if found["device"]["status"]["Uid"].startswith("0") else set()), refused
    assert found["device"]["decoded"] == [""] * len(confined_children.WIDTHS)
    assert found["files"] == {"token": "a secret", "open to all": "as it was"}
    print(found["device"]["status"])
