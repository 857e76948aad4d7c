"""The fault tier: real server processes under load, faults and clients that misbehave.

`VITWIRE_FAULT_SCALE` (1 unless set) shortens it: CI runs a thirtieth. Figures go to stdout, and as JSON lines
to the file that `VITWIRE_FAULT_FIGURES` names.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from entered import entered
from faults import FAULTY, SCALE, Note
from servers import serving


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


BOUNDS = ("--max-queued-items", "64", "--max-queued-bytes", str(64 << 20), "--max-request-bytes", str(16 << 20))
GRAPHS = ("--graphs", "simulated", "--budgets", "16,64,256", "--max-budget-tokens", "256")
FLAGS = (*BOUNDS, *GRAPHS, "--idle-seconds", "3", "--max-items-per-batch", "4", "--canary-seconds", "1")

server = entered(lambda checkpoints, fault: serving(checkpoints("qwen2_vl"), *FLAGS, program=(FAULTY, str(fault))))
"""A server of bounded queues and little patience, whose engine can be broken."""
