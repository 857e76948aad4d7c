"""What an edge inherits from the engine's process."""

import os
from typing import NamedTuple

_VARIABLE = "VITWIRE_EDGE"


class Inherited(NamedTuple):
    """Descriptors, and what belongs to them."""

    link: int
    arena: int
    arena_bytes: int
    number: int
    """Of this edge."""
    edges: int
    """Number of edges."""

    @property
    def environment(self) -> dict[str, str]:
        """The variable that an edge reads it from."""
        return {_VARIABLE: ",".join(map(str, self))}

    @classmethod
    def take(cls) -> "Inherited":
        """What this process inherited, removed from the environment. Raises KeyError in other processes."""
        return cls(*map(int, os.environ.pop(_VARIABLE).split(",")))
