"""Shares within shares: callers take turns, then the connections of a caller, then the requests of a connection."""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeAlias, TypeVar

from vitwire_server.scheduling.shares import Shares

E = TypeVar("E", bound=Hashable)
Path: TypeAlias = tuple[Hashable, ...]
"""The flows that an element belongs to, the outermost first; all paths have the same length."""


class NestedShares(Generic[E]):
    """Deficit round robin at every level of a path; pure and deterministic."""

    def __init__(self, quantum: int) -> None:
        """`quantum` is what a turn is worth, in the unit of the costs."""
        self._quantum = quantum
        self._levels: dict[Path, Shares[Hashable, E]] = {}
        """Flows within each flow, by its path."""

    def __bool__(self) -> bool:
        return bool(self._levels)

    def push(self, path: Path, element: E, cost: int) -> None:
        """Append to the innermost flow."""
        for above, flow in _steps(path):
            self._levels.setdefault(above, Shares(self._quantum)).push(flow, element, cost)

    def heads(self, above: Path = ()) -> Iterator[E]:
        """The first element of each innermost flow, in the order in which they should run; changes nothing."""
        for flow, first in self._levels[above].heads() if above in self._levels else ():
            path = (*above, flow)
            if path in self._levels:
                yield from self.heads(path)
            else:
                yield first

    def first(self, path: Path) -> E | None:
        """The first element of an innermost flow."""
        shares = self._levels.get(path[:-1])
        return shares.first(path[-1]) if shares else None

    def take(self, path: Path, element: E) -> None:
        """Remove an element that runs now; its flows pay for it."""
        for above, flow in _steps(path):
            self._levels[above].take([(flow, element)])
        self._tidy(path)

    def drop(self, path: Path, element: E) -> None:
        """Remove an element that will not run."""
        for above, flow in _steps(path):
            self._levels[above].drop(flow, element)
        self._tidy(path)

    def charge(self, path: Path, cost: int) -> None:
        """An element of this path that was taken cost more than its flows paid."""
        for above, flow in _steps(path):
            if above in self._levels:
                self._levels[above].charge(flow, cost)

    def _tidy(self, path: Path) -> None:
        for above, _ in _steps(path):
            if not self._levels[above]:
                del self._levels[above]


def _steps(path: Path) -> Iterator[tuple[Path, Hashable]]:
    """Each flow of the path, with the path of what contains it."""
    for depth, flow in enumerate(path):
        yield path[:depth], flow
