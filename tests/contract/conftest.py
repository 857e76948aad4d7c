"""What several files of this folder use."""

import pytest

from manifests import TARGETS, Document, documents_of


@pytest.fixture(params=TARGETS)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    """The objects of the base, of an overlay, or of an overlay with more components."""
    return documents_of(request.param)
