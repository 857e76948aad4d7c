"""Who asks for something."""

from itertools import count
from typing import NamedTuple

from vitwire.shared.fairness.shares import Path

_numbers = count()


class Caller(NamedTuple):
    """A name that all requests of a caller share, and the request."""

    name: str
    request: int

    @classmethod
    def of(cls, name: str) -> "Caller":
        """A new request of a caller."""
        return cls(name, next(_numbers))

    @property
    def path(self) -> Path:
        """By which it gets places: callers share them, then the requests of each."""
        return 0, self.name, self.request
