"""A device that is shared: what a fault of one process does to others, and the server's bound of memory."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from servers import serving

GIB = 1 << 30
NO_MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
NEIGHBOUR = """
import torch
matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
while True:
    for _ in range(10):
        matrix @ matrix
    torch.cuda.synchronize()
    print("well", flush=True)
"""
FAULTS = {
    "illegal access": """
import torch, triton, triton.language as tl
@triton.jit
def wild(pointer):
    tl.store(pointer + (1 << 40), 1.0)
wild[(1,)](torch.zeros(4, device="cuda"))
torch.cuda.synchronize()
""",
    "device assert": """
import torch
torch.zeros(1, device="cuda")[torch.tensor([10**6], device="cuda")]
torch.cuda.synchronize()
""",
    "killed in a kernel": """
import os, torch
matrix = torch.randn(16384, 16384, device="cuda", dtype=torch.bfloat16)
for _ in range(60):
    matrix @ matrix
os.kill(os.getpid(), 9)
""",
    "all memory": """
import torch
held = []
try:
    while True:
        held.append(torch.empty(1 << 29, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError:
    pass
""",
}


@pytest.fixture(autouse=True)
def _on_a_gpu(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("a CPU has no contexts")


@pytest.fixture(scope="module")
def mps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Variables of clients of an MPS daemon."""
    if not shutil.which("nvidia-cuda-mps-control"):
        pytest.skip("this machine has no nvidia-cuda-mps-control")
    folder = tmp_path_factory.mktemp("mps")
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    # Without the variable of visible devices, by which the daemon would number them anew.
    around = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | variables
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=around, check=True, timeout=30)
    yield variables
    subprocess.run(["nvidia-cuda-mps-control"], env=around, input=b"quit\n", timeout=30, check=False)


@contextmanager
def neighbour(path: Path, variables: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that multiplies matrices."""
    (path / "neighbour.py").write_text(NEIGHBOUR)
    command = [sys.executable, str(path / "neighbour.py")]
    with subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"well\n"
        yield process
        process.kill()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("sharing", ["time slicing", "MPS", "neighbour under MPS"])
def test_fault_domains(sharing: str, fault: str, mps: Mapping[str, str], tmp_path: Path) -> None:
    """Only under MPS, and only some faults, end the neighbour."""
    (tmp_path / "fault.py").write_text(FAULTS[fault])
    with neighbour(tmp_path, NO_MPS if sharing == "time slicing" else mps) as process:
        variables = mps if sharing == "MPS" else NO_MPS
        subprocess.run(
            [sys.executable, str(tmp_path / "fault.py")], env=os.environ | variables, check=False, timeout=90
        )
        time.sleep(1.5)
        ends = sharing == "MPS" and fault in ("illegal access", "killed in a kernel")
        assert (process.poll() is not None) == ends


def test_the_server_stays_within_its_memory(checkpoints: Callable[[str], Path]) -> None:
    """Contexts, graphs and embeddings included: what the device has less while it serves."""
    before, _ = torch.cuda.mem_get_info()
    flags = ["--device=cuda:0", "--device-memory=5GiB", "--nixl", "--rpc-processes=1", "--store-bytes=1GiB"]
    with serving(checkpoints("qwen3_vl"), *flags) as server:
        assert before - torch.cuda.mem_get_info()[0] <= 5 * GIB
        assert "at most 5 GiB for this server" in server.log()
