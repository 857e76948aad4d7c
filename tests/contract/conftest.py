"""What several files of this folder use."""

import pytest
import transformers
from packaging.version import Version

from manifests import TARGETS, Document, documents_of

collect_ignore = [] if Version(transformers.__version__) >= Version("5.23") else ["test_tile_processors.py"]
"""It compares with processors that older releases lack."""


@pytest.fixture(params=TARGETS)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    """The objects of the base, of an overlay, or of an overlay with more components."""
    return documents_of(request.param)
