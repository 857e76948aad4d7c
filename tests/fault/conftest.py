"""The fault tier: real server processes under load, faults and clients that misbehave.

`VITWIRE_FAULT_SCALE` (1 unless set) shortens it: CI runs a thirtieth. Figures go to stdout, and as JSON lines
to the file that `VITWIRE_FAULT_FIGURES` names.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import Checkpoints
from faults import FAULTY, SCALE, Note
from servers import ServerProcess, serving


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other by spinning, which starves servers that share few cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """Writes down figures of this test."""

    def write(**figures: object) -> None:
        line = json.dumps({"test": request.node.name, "scale": SCALE} | figures)
        print(line)
        if path := os.environ.get("VITWIRE_FAULT_FIGURES"):
            with Path(path).open("a", encoding="utf-8") as out:
                out.write(line + "\n")

    return write


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is written here breaks the engine, see `faulty_server.py`."""
    return tmp_path_factory.mktemp("faults") / "fault"


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, fault: Path) -> Iterator[ServerProcess]:
    """A server of bounded queues and little patience, whose engine can be broken."""
    bounds = ("--max-queued-items", "64", "--max-queued-bytes", str(64 << 20), "--max-request-bytes", str(16 << 20))
    flags = ("--graphs", "simulated", "--budgets", "16,64,256", "--max-budget-tokens", "256", "--idle-seconds", "3")
    batches = ("--max-items-per-batch", "4", "--canary-seconds", "1")
    with serving(checkpoints("qwen2_vl"), *bounds, *flags, *batches, program=(FAULTY, str(fault))) as process:
        yield process
