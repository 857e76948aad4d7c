"""The version of the installed package."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

UNRELEASED = "0.0.0"
"""Of a source tree that is on the path but not installed, as the client's `__version__`."""


@cache
def release() -> str:
    """The version, as GetModel and traces carry it."""
    try:
        return version("vitwire")
    except PackageNotFoundError:
        return UNRELEASED
