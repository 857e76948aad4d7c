"""Processes that read strangers' bytes try what they must not be able to do: decoders, the router's workers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import acts
from confined_children import CODECS, IMAGES, WIDTHS, started
from vitwire_server.preparing.files import decoders

PROGRAM = Path(__file__).parents[4] / "tests/support/confined_children.py"
OTHER = 1234
"""An ordinary user."""
WITHOUT = ("setpriv", "--inh-caps=-all", "--bounding-set=-all", "--securebits=+noroot")
"""Runs a command without any capability: as an ordinary user, but files of root are its own."""
USERS = ("this one", "without capabilities", "an ordinary one")


def test_without_a_filter_all_else_holds() -> None:
    """The parent logs the reason once."""
    program = """
import os, platform
platform.machine = lambda: "riscv64"
from vitwire_children.confine import May, confined
from confined_children import status
print(confined(os.getppid(), May.COMPUTE, 1 << 30))
print(status(os.getpid()))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    reason, status = ran.stdout.splitlines()
    assert reason == "[Errno 38] there is no confinement on riscv64"
    assert "'NoNewPrivs': '1', 'Seccomp': '0', 'CapEff': '0000000000000000'" in status
    assert "'oom_score_adj': '1000'" in status


async def test_a_decoder_without_a_filter_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decoders, "_WORKER", "unconfined_decoder")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for _ in range(2):
        await (await started()).close()
    (record,) = caplog.records
    assert record.getMessage().endswith("can make any system call: [Errno 38] there is no confinement on riscv64")


def _found(user: str, folder: Path) -> dict[str, Any]:
    children = ("decoder", "worker", "device:cpu", "clips:cpu") if user == USERS[0] else ("decoder", "worker")
    command, options = [sys.executable, str(PROGRAM), str(folder), *children], dict[str, Any]()
    if user != USERS[0]:
        if os.geteuid() != 0:
            pytest.skip("this user is an ordinary one")
        if user == USERS[1]:
            command = [*WITHOUT, *command]
        else:
            os.chown(folder, OTHER, OTHER)
            for parent in (folder, *folder.parents[:2]):
                parent.chmod(0o755)
            options = {"user": OTHER, "group": OTHER, "extra_groups": []}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["TRITON_CACHE_DIR"] = str(folder.parent / "triton")
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, **options)
    except (PermissionError, FileNotFoundError) as error:
        pytest.skip(f"it cannot run this interpreter: {error}")
    assert acts.FORGED not in ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("user", USERS)
def test_acts_are_refused(user: str, tmp_path: Path) -> None:
    found = _found(user, tmp_path)
    is_root = os.geteuid() == 0
    own = {USERS[0]: 65534 if is_root else os.geteuid(), USERS[1]: 0, USERS[2]: OTHER}[user]
    for name in found.keys() & {"decoder", "worker", "device", "clips"}:
        tried, errors = found[name]["acts"], {"EPERM", "ENOSYS"}
        if name == "clips":
            assert (tried.pop("open"), tried.pop("openat")) == ("EFAULT", "EFAULT"), "Landlock refuses paths"
            errors.add("EACCES")
        refused = {act: made for act, made in tried.items() if made not in errors}
        assert len(tried) > 150
        assert refused.keys() <= ({"become root"} if own == 0 else set()), (name, refused)
        status = found[name]["status"]
        assert status.pop("Uid").split() == [str(own)] * 4
        none = "0" * 16
        assert status == {
            "NoNewPrivs": "1", "Seccomp": "2", "CapEff": none, "CapPrm": none, "oom_score_adj": "1000", "owner": "0",
        }, name  # fmt: skip
    assert found["files"] == {"token": "a secret", "open to all": "as it was"}
    assert found["names"] == ["open to all", "token"]
    assert found["decoder"]["decoded"] == [*IMAGES, *CODECS]
    assert found["worker"]["decoded"] == list(IMAGES)
    if user == USERS[0]:
        assert found["device"]["decoded"] == [""] * len(WIDTHS)
        assert found["clips"]["decoded"] == ["", ""]
