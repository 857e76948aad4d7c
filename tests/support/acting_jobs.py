"""Jobs of a gateway's worker that tries acts."""

import acts
from vitwire_gateway.images.image_files import header_of

__all__ = ["acted", "header_of"]


def acted(_: bytes) -> str:
    """What came of the acts."""
    return acts.results()
