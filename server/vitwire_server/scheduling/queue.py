"""Items waiting for the engine: two priorities, and a share of each for every request in it."""

from collections.abc import Iterable

from vitwire_server.scheduling.shares import Shares
from vitwire_server.scheduling.tickets import Entry, Priority, Ticket

_QUANTUM = 256
"""Tokens of one turn: a 512 x 512 image in most families."""
_MOST_PASSED_BY = 15
"""Batches in a row that may leave batch-priority items waiting before one of them leads."""


class Queue:
    """First in, first out within a request; requests of one priority share by deficit round robin.

    A single image next to a request of 200 is in the next batch. Interactive requests go before batch
    ones, but every sixteenth batch is led by a batch one if any waits, so that none starves. Not
    thread-safe: the scheduler's lock guards it.
    """

    def __init__(self) -> None:
        self._levels: dict[Priority, Shares[Ticket, Entry]] = {level: Shares(_QUANTUM) for level in Priority}
        self._items = 0
        self.nbytes = 0
        """Bytes of the pixels that wait."""
        self.tokens = 0
        """Tokens of the items that wait."""
        self._passed_by = 0

    def __len__(self) -> int:
        return self._items

    def push(self, entry: Entry) -> None:
        """Append to the share of the entry's ticket."""
        self._level(entry).push(entry.ticket, entry, max(1, entry.item.footprint.tokens))
        self._count(entry, 1)

    def window(self, limit: int, tokens: int) -> list[Entry]:
        """Entries to pack the next batch from: the first `limit` of at most `tokens` tokens, one at least.

        With more to choose from, the planner could fill the batch with later arrivals and postpone an earlier turn.
        """
        entries = self.peek(limit)
        left = tokens
        for position, entry in enumerate(entries):
            left -= entry.item.footprint.tokens
            if left < 0 and position:
                return entries[:position]
        return entries

    def peek(self, limit: int) -> list[Entry]:
        """Up to `limit` entries in the order they should run."""
        first, second = (self._levels[level] for level in Priority)
        if self._passed_by < _MOST_PASSED_BY or not second:
            ahead = first.order(limit)
            return ahead + second.order(limit - len(ahead))
        (leader,) = second.order(1)
        ahead = [leader, *first.order(limit - 1)]
        return ahead + second.order(limit - len(ahead) + 1)[1:]

    def tokens_ahead(self, priority: Priority, tokens: int) -> int:
        """Tokens that would run before a new request of `tokens` tokens is done, as things are now."""
        higher = sum(shares.backlog for level, shares in self._levels.items() if level < priority)
        return higher + self._levels[priority].ahead(tokens)

    def take(self, entries: Iterable[Entry]) -> None:
        """Remove entries that run now; their requests pay for them."""
        taken = list(entries)
        for level, shares in self._levels.items():
            here = [(entry.ticket, entry) for entry in taken if entry.ticket.priority is level]
            if level is Priority.BATCH and taken:
                self._passed_by = 0 if here or not shares else self._passed_by + 1
            if here:
                shares.take(here)
        for entry in taken:
            self._count(entry, -1)

    def drop(self, entry: Entry) -> None:
        """Remove an entry that will not run."""
        self._level(entry).drop(entry.ticket, entry)
        self._count(entry, -1)

    def remove(self, ticket: Ticket) -> list[Entry]:
        """Remove and return what still waits of one request."""
        removed = self._levels[ticket.priority].remove(ticket)
        for entry in removed:
            self._count(entry, -1)
        return removed

    def _level(self, entry: Entry) -> Shares[Ticket, Entry]:
        return self._levels[entry.ticket.priority]

    def _count(self, entry: Entry, sign: int) -> None:
        self._items += sign
        self.nbytes += sign * entry.item.nbytes
        self.tokens += sign * entry.item.footprint.tokens
