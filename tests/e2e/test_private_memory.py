"""Nobody but the kernel's administrator reads the memory of processes that have tokens, keys and callers' pictures."""

import os
import subprocess
import sys
from pathlib import Path

from checkpoints import Checkpoints
from processes import edges
from servers import PIXELS_ONLY, serving

ORDINARY = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace") if os.geteuid() == 0 else ()
"""Runs a command without what lets root read any process."""


def is_readable(pid: int) -> bool:
    """Whether a process of the same user may read and write this one."""
    program = f"import os; os.open('/proc/{pid}/mem', os.O_RDWR)"
    ran = subprocess.run([*ORDINARY, sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=False)
    assert not ran.returncode or "PermissionError" in ran.stderr, ran.stderr
    return not ran.returncode


def test_memory_of_a_server_is_private(checkpoints: Checkpoints) -> None:
    with serving(checkpoints("qwen2_vl"), "--rpc-processes", "2", *PIXELS_ONLY, wrapper=ORDINARY) as server:
        processes = [server.process.pid, *(each.pid for each in edges(server))]
        assert len(processes) == 3
        assert not any(is_readable(pid) for pid in processes)
        assert server.page("/healthz")[0] == 200
    with subprocess.Popen([*ORDINARY, "sleep", "60"]) as other:
        assert is_readable(other.pid), "else this shows nothing"
        other.kill()


def test_memory_of_a_router_is_private() -> None:
    router = Path(sys.executable).with_name("vitwire"), "router"
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    command = [*ORDINARY, *router, "--port=0", "--no-engine", "--target=no.where:1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        try:
            assert process.stdout
            assert any(b"listening on" in line for line in process.stdout)
            assert not is_readable(process.pid)
        finally:
            process.kill()
