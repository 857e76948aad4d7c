"""Flash attention 4."""

from vitwire_server.runtime.attention.backends.flash import from_package
from vitwire_server.runtime.attention.interface import Attend


def load() -> Attend:
    """Raises ImportError if the package is not installed."""
    return from_package("flash_attn.cute")
