"""Fixtures that every tier shares."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

from reference import Reference
from references import reference_of
from rigs import Yardstick
from vitwire_server.towers.demo import write_demo_checkpoint
from vitwire_server.towers.families import FAMILIES

INSTALLED = Version(transformers.__version__)
MODEL_TYPES = [name for name, row in FAMILIES.items() if Version(row.transformers) <= INSTALLED]
"""Rows of the table that the installed transformers can compute."""
Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Tiny whole VLMs by model_type, written once a session."""

    @cache
    def checkpoint(model_type: str) -> Path:
        folder = tmp_path_factory.mktemp(model_type) / f"tiny-{model_type}"
        write_demo_checkpoint(model_type, folder)
        return folder

    return checkpoint


@pytest.fixture(scope="session")
def references(checkpoints: Checkpoints) -> Callable[[str, torch.dtype], Reference]:
    """Plain transformers by model_type and dtype, loaded once a session."""

    @cache
    def reference(model_type: str, dtype: torch.dtype = torch.float32) -> Reference:
        return reference_of(model_type, checkpoints(model_type), dtype)

    return reference


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where engines run; tests/gpu puts a GPU here."""
    return torch.device("cpu")


@pytest.fixture(scope="session")
def yardsticks(checkpoints: Checkpoints, device: torch.device) -> Callable[[str, torch.dtype], Yardstick]:
    """What rows of a model_type and dtype are judged by, loaded once a session."""

    @cache
    def yardstick(model_type: str, dtype: torch.dtype) -> Yardstick:
        exact = reference_of(model_type, checkpoints(model_type))
        return Yardstick(exact, reference_of(model_type, checkpoints(model_type), dtype, str(device)))

    return yardstick
