"""`make gpu-test`: the engine on a GPU.

Without CUDA the run fails at once. VITWIRE_GPU_TEST_DEVICE=cpu runs the same tests on simulated graphs,
and says which of them only a GPU can run.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rigs import Rig

_DEVICE = os.environ.get("VITWIRE_GPU_TEST_DEVICE", "cuda")


def pytest_sessionstart() -> None:
    if _DEVICE not in ("cpu", "cuda"):
        pytest.exit(f"VITWIRE_GPU_TEST_DEVICE is {_DEVICE!r}; it may be cuda or cpu", returncode=2)
    if _DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.exit(
            f"torch {torch.__version__} sees no CUDA device. VITWIRE_GPU_TEST_DEVICE=cpu runs these tests on "
            "simulated graphs instead.",
            returncode=2,
        )


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(_DEVICE, 0) if _DEVICE == "cuda" else torch.device(_DEVICE)


@pytest.fixture
def captured(checkpoints: Callable[[str], Path], device: torch.device) -> Callable[[str], Rig]:
    """A tower of a model_type in bfloat16, all of whose budgets were captured; skips what cannot be served here."""

    def rig(model_type: str) -> Rig:
        if device.type == "cpu":
            pytest.skip("tests/contract says it of simulated graphs")
        made = Rig.of(checkpoints(model_type), torch.bfloat16, device)
        assert not made.graphs.dropped, made.graphs.dropped
        return made

    return rig
