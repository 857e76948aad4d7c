"""What holds for every kind of child process: what it inherits, and that it ends with its parent."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import parents
from vitwire.shared.agents import is_installed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")


@pytest.mark.parametrize("kind", [each.__name__ for each in parents.KINDS])
def test_children_are_given_little_and_end_with_their_parent(kind: str, tmp_path: Path) -> None:
    """The parent is killed while its children are stopped."""
    if kind == "sender" and not is_installed():
        pytest.skip("NIXL is not installed")
    options: dict[str, Any] = {"env": os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, "cwd": tmp_path}
    with subprocess.Popen([sys.executable, parents.__file__, kind], stderr=subprocess.PIPE, **options) as parent:
        try:
            assert parent.stderr
            pids = json.loads(parent.stderr.readline())
            children = [psutil.Process(pid) for pid in pids]
            assert len(children) == 1 + (kind == "sender"), "a factory and its sender"
            for child in children:
                assert _inherited(child.pid, secret=kind == "supervised") == []
                child.suspend()
        finally:
            parent.kill()
        _, alive = psutil.wait_procs(children, 20)
        assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


def _inherited(pid: int, *, secret: bool) -> list[str]:
    """What a process has of its parent that it was not given. Those of `--devices` have the parent's variables."""
    folder = Path(f"/proc/{pid}")
    try:
        files = [str(each.readlink()) for each in (folder / "fd").iterdir() if each.is_symlink()]
        variables = (folder / "environ").read_bytes().decode()
    except PermissionError:
        pytest.skip("only root looks into private processes")
    found = [name for name in files if parents.OPEN in name]
    return found if secret or parents.SECRET not in variables else [*found, parents.SECRET]
