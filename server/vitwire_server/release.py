"""The version of the installed package."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

UNRELEASED = "0.0.0"
"""Version of a source tree that is not installed; the client's `__version__` uses the same."""


@cache
def release() -> str:
    """The version reported by GetModel and in traces."""
    try:
        return version("vitwire")
    except PackageNotFoundError:
        return UNRELEASED
