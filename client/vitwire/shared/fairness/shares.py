"""Deficit round robin among nested flows: who goes next. Pure and deterministic.

Flows take turns; a turn is worth a quantum, in the unit of the costs, and what a flow does not use of it adds up
(Shreedhar and Varghese 1995). More than one turn of a flow may be taken at once, and out of order, so a
flow can be in debt: its next turns pay it off, and flows that arrive meanwhile go first.
"""

from collections.abc import Container, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain, count, islice, pairwise
from operator import itemgetter
from typing import Generic, TypeAlias, TypeVar

E = TypeVar("E", bound=Hashable)
Path: TypeAlias = tuple[int, Hashable, *tuple[Hashable, ...]]
"""What an element belongs to: its priority, 0 or 1, then its flows, the outermost first. All have the same length."""
_MOST_PASSED_BY = 15
"""Times in a row that elements of priority 1 may be left waiting before one of them goes first."""


@dataclass(slots=True, eq=False)
class _Flow(Generic[E]):
    """Waiting elements of a flow, in order of arrival. Its deficit is the credit of what contains it, less `paid`."""

    name: Hashable
    paid: int = 0
    turn: int = 0
    running: int = 0
    """Elements that were begun."""
    credit: int = 0
    """What each flow within it was given."""
    backlog: int = 0
    costs: dict[E, int] = field(default_factory=dict)
    inner: dict[Hashable, "_Flow[E]"] = field(default_factory=dict)
    """Flows within it, which have all of its elements; none within an innermost flow."""


class Shares(Generic[E]):
    """Elements of nested flows in the order of deficit round robin, elements of priority 0 first.

    Every sixteenth time one of priority 1 goes first, so that none starves. Within a flow elements keep the order of
    arrival. A flow that empties loses what it had saved or owed.
    """

    def __init__(self, quantum: int) -> None:
        """`quantum` is what a turn is worth, in the unit of the costs."""
        self._quantum = quantum
        self._turns = count()
        self._levels = _Flow[E](0), _Flow[E](1)
        """By priority."""
        self._passed_by = 0

    def __len__(self) -> int:
        first, last = self._levels
        return len(first.costs) + len(last.costs)

    def has_flow(self, name: Hashable) -> bool:
        """Whether something of an outermost flow waits or runs."""
        return any(name in level.inner for level in self._levels)

    @property
    def backlog(self) -> int:
        """The cost of all that waits."""
        return sum(level.backlog for level in self._levels)

    def push(self, path: Path, element: E, cost: int) -> None:
        """Append to the innermost flow; a flow of which nothing waits joins the end of the line with a deficit of 0."""
        credit = 0
        for flow in self._flows(path, new=True):
            if not flow.costs:
                flow.paid, flow.turn = credit, next(self._turns)
            flow.costs[element] = cost
            flow.backlog += cost
            credit = flow.credit

    def order(self, limit: int) -> list[E]:
        """Up to `limit` elements in the order they should run, by their outermost flows; changes nothing."""
        first, last = (self._ordered(level) if level.costs else iter(()) for level in self._levels)
        leader = islice(last, int(self._is_overdue))
        return list(islice(chain(leader, first, last), limit))

    def heads(self, skipped: Container[Hashable] = ()) -> Iterator[E]:
        """The first element of each innermost flow, in the order in which they should run; skips outermost flows."""
        for level in reversed(self._levels) if self._is_overdue else self._levels:
            yield from self._heads(level, skipped)

    def first(self, path: Path) -> E | None:
        """The first element of an innermost flow."""
        flows = self._flows(path)
        return next(iter(flows[-1].costs), None) if len(flows) == len(path) else None

    def ahead(self, priority: int, cost: int) -> int:
        """The cost of what runs before a new flow of `cost` is done.

        This is all of more urgent priorities, and of each other flow of its priority at most `cost` and a turn.
        """
        urgent, most = sum(level.backlog for level in self._levels[:priority]), cost + self._quantum
        return urgent + sum(min(flow.backlog, most) for flow in self._levels[priority].inner.values())

    def take(self, elements: Iterable[tuple[Path, E]]) -> None:
        """Remove elements that run now. Their flows pay and go to the end of the line.

        First, all rounds up to the next element pass. Afterwards the flow with the least debt owes no more
        than was taken: a flow that had everything to itself is not punished for it.
        """
        last = self._levels[-1]
        waits = bool(last.costs)
        taken: dict[_Flow[E], int] = {}  # costs, by the flow that contains those that pay
        for path, element in elements:
            flows = self._flows(path)
            cost = flows[0].costs[element]
            for container, flow in pairwise(flows):
                if container not in taken:
                    self._pass_rounds(container)
                taken[container] = taken.get(container, 0) + cost
                flow.paid += cost
                flow.turn = next(self._turns)
            self._remove(flows, element)
        for container, cost in taken.items():
            self._pass_rounds(container, -(-cost // self._quantum))
        if taken:
            self._passed_by = self._passed_by + 1 if waits and last not in taken else 0

    def drop(self, path: Path, element: E) -> None:
        """Remove an element that will not run; its flows do not pay for it."""
        self._remove(self._flows(path), element)

    def remove(self, path: Path) -> list[E]:
        """Remove and return all elements of an innermost flow."""
        removed = []
        while (element := self.first(path)) is not None:
            self.drop(path, element)
            removed.append(element)
        return removed

    def begin(self, path: Path) -> None:
        """Something of these flows runs until `end`: in the same round, flows of which less runs go first."""
        for flow in self._flows(path, new=True):
            flow.running += 1

    def end(self, path: Path, cost: int) -> None:
        """What was begun has ended; flows of which something waits pay `cost` more for it."""
        flows = self._flows(path)
        for flow in flows:
            flow.running -= 1
            flow.paid += cost
        self._forget_idle(flows)

    @property
    def _is_overdue(self) -> bool:
        return self._passed_by >= _MOST_PASSED_BY

    def _flows(self, path: Path, *, new: bool = False) -> list[_Flow[E]]:
        """The level and the flows of a path, each of which contains the next; `new`: also those that do not exist."""
        flows = [container := self._levels[path[0]]]
        for name in path[1:]:
            flow = container.inner.get(name)
            if flow is None:
                if not new:
                    break
                flow = container.inner[name] = _Flow(name)
            flows.append(flow)
            container = flow
        return flows

    def _remove(self, flows: list[_Flow[E]], element: E) -> None:
        for flow in flows:
            flow.backlog -= flow.costs.pop(element)
        self._forget_idle(flows)

    def _forget_idle(self, flows: list[_Flow[E]]) -> None:
        for container, flow in pairwise(flows):
            if not (flow.costs or flow.running):
                del container.inner[flow.name]
                break

    def _ordered(self, container: _Flow[E]) -> Iterator[E]:
        visits = (self._visits(container.credit, flow) for flow in container.inner.values() if flow.costs)
        return map(itemgetter(-1), merge(*visits))  # no two flows have a turn in common

    def _heads(self, container: _Flow[E], skipped: Container[Hashable] = ()) -> Iterator[E]:
        if not container.inner:
            yield from islice(container.costs, 1)
        waiting = [flow for flow in container.inner.values() if flow.costs and flow.name not in skipped]
        for flow in sorted(waiting, key=lambda each: next(self._visits(container.credit, each))[:-1]):
            yield from self._heads(flow)

    def _visits(self, credit: int, flow: _Flow[E]) -> Iterator[tuple[int, int, int, E]]:
        """A flow's elements after their place in the line: the round in which the flow can pay, what runs, its turn."""
        due = flow.paid - credit
        for element, cost in flow.costs.items():
            due += cost
            yield max(0, -(-due // self._quantum)), flow.running, flow.turn, element

    def _pass_rounds(self, container: _Flow[E], left: int = 0) -> None:
        """Let all rounds up to the next element pass, but for `left`."""
        dues = (flow.paid + next(iter(flow.costs.values())) for flow in container.inner.values() if flow.costs)
        due = min(dues, default=container.credit) - container.credit
        container.credit += self._quantum * max(0, -(-due // self._quantum) - left)
