"""What several files of this folder use."""

import shutil
from pathlib import Path

import pytest

from checkpoints import Checkpoints
from manifests import TARGETS, Document, documents_of


@pytest.fixture(params=TARGETS)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    """The objects of the base, of an overlay, or of an overlay with more components."""
    return documents_of(request.param)


@pytest.fixture
def copied(checkpoints: Checkpoints, tmp_path: Path) -> Checkpoints:
    """Copies of tiny checkpoints, to be changed."""
    return lambda model_type: Path(shutil.copytree(checkpoints(model_type), tmp_path / "copy"))
