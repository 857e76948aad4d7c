"""Deficit round robin: a share of the device for each request, counted in tokens.

Flows take turns; a turn is worth a quantum of tokens, and what a flow does not use of it adds up
(Shreedhar and Varghese 1995). A batch may hold more than one turn of a flow, and out of order, so a
flow can be in debt: its next turns pay it off, and flows that arrive meanwhile go first.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import count, islice
from typing import Generic, TypeAlias, TypeVar

F = TypeVar("F", bound=Hashable)
E = TypeVar("E", bound=Hashable)
Path: TypeAlias = tuple[Hashable, ...]
"""The flows that an element belongs to, the outermost first; all paths have the same length."""


def _line(visit: tuple[int, int, object]) -> tuple[int, int]:
    return visit[0], visit[1]


@dataclass(slots=True)
class _Share(Generic[E]):
    """Waiting elements of one flow, by cost. Its deficit is the credit that every flow was given, less `paid`."""

    paid: int
    turn: int
    backlog: int = 0
    costs: dict[E, int] = field(default_factory=dict)


class Shares(Generic[F, E]):
    """Elements of many flows in the order of deficit round robin; pure and deterministic.

    Within a flow elements keep the order of arrival. A flow that empties loses what it had saved or owed.
    """

    def __init__(self, quantum: int) -> None:
        """`quantum` is what a turn is worth, in the unit of the costs."""
        self._quantum = quantum
        self._credit = 0
        self._turns = count()
        self._shares: dict[F, _Share[E]] = {}

    def __bool__(self) -> bool:
        return bool(self._shares)

    def push(self, flow: F, element: E, cost: int) -> None:
        """Append to a flow; a new flow joins the end of the line with a deficit of 0."""
        share = self._shares.get(flow)
        if share is None:
            share = self._shares[flow] = _Share(self._credit, next(self._turns))
        share.costs[element] = cost
        share.backlog += cost

    def order(self, limit: int) -> list[E]:
        """Up to `limit` elements in the order they should run; changes nothing."""
        return [element for _, _, element in islice(merge(*map(self._visits, self._shares.values()), key=_line), limit)]

    @property
    def backlog(self) -> int:
        """The cost of all that waits."""
        return sum(share.backlog for share in self._shares.values())

    def ahead(self, cost: int) -> int:
        """The cost of what runs before a new flow of `cost` is done: of each other flow at most `cost` and a turn."""
        most = cost + self._quantum
        return sum(min(share.backlog, most) for share in self._shares.values())

    def heads(self) -> list[tuple[F, E]]:
        """The first element of each flow, in the order in which flows have their turns; changes nothing."""
        firsts = ((flow, next(self._visits(share))) for flow, share in self._shares.items())
        return [(flow, visit[2]) for flow, visit in sorted(firsts, key=lambda each: _line(each[1]))]

    def first(self, flow: F) -> E | None:
        """The first element of a flow."""
        share = self._shares.get(flow)
        return next(iter(share.costs)) if share else None

    def charge(self, flow: F, cost: int) -> None:
        """Let a flow pay for what it took; without effect if nothing of it waits."""
        if share := self._shares.get(flow):
            share.paid += cost

    def take(self, elements: Iterable[tuple[F, E]]) -> None:
        """Remove elements that run now. Their flows pay and go to the end of the line.

        First, all rounds up to the next element pass. Afterwards the flow with the least debt owes no more
        than was taken: a flow that had the device to itself is not punished for it.
        """
        self._pass_rounds()
        taken = 0
        for flow, element in elements:
            share = self._shares[flow]
            cost = self.drop(flow, element)
            share.paid += cost
            share.turn = next(self._turns)
            taken += cost
        self._pass_rounds(-(-taken // self._quantum))

    def drop(self, flow: F, element: E) -> int:
        """Remove an element that will not run; its flow does not pay for it. Returns its cost."""
        share = self._shares[flow]
        cost = share.costs.pop(element)
        share.backlog -= cost
        if not share.costs:
            del self._shares[flow]
        return cost

    def remove(self, flow: F) -> list[E]:
        """Remove and return all elements of a flow."""
        share = self._shares.pop(flow, None)
        return list(share.costs) if share else []

    def _visits(self, share: _Share[E]) -> Iterator[tuple[int, int, E]]:
        """A flow's elements, each with the round in which the flow can pay for it, and the flow's turn."""
        due = share.paid
        for element, cost in share.costs.items():
            due += cost
            yield max(0, -(-(due - self._credit) // self._quantum)), share.turn, element

    def _pass_rounds(self, left: int = 0) -> None:
        """Let all rounds up to the next element pass, but for `left`."""
        due = min((share.paid + next(iter(share.costs.values())) for share in self._shares.values()), default=0)
        rounds = -(-(due - self._credit) // self._quantum) if self._shares else 0
        self._credit += self._quantum * max(0, rounds - left)


class NestedShares(Generic[E]):
    """Shares within shares: deficit round robin at every level of a path. Pure and deterministic."""

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
