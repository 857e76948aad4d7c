"""Decoders on a GPU, once they run: what they may not do, and that they still decode files of any size."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("nvidia.nvimgcodec")

import confined_children


def test_acts_are_refused(device: torch.device, tmp_path: Path) -> None:
    films = [f"clips:{device}"] if find_spec("PyNvVideoCodec") else []
    program = [sys.executable, confined_children.__file__, str(tmp_path), f"device:{device}", *films]
    cache = os.environ.get("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": cache}
    ran = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    acts = found["device"]["acts"]
    refused = {act: made for act, made in acts.items() if made not in ("EPERM", "ENOSYS")}
    assert refused.keys() <= ({"become root"} if found["device"]["status"]["Uid"].startswith("0") else set()), refused
    assert found["device"]["decoded"] == [""] * len(confined_children.WIDTHS)
    if films:
        acts = {act: made for act, made in found["clips"]["acts"].items() if act not in ("open", "openat")}
        assert {*acts.values()} <= {"EPERM", "ENOSYS", "EACCES"}, acts
        assert found["clips"]["decoded"] == ["", ""]
    assert found["files"] == {"token": "a secret", "open to all": "as it was"}
    print(found["device"]["status"])
