"""Items waiting for the engine: two priorities, and a share of each for every request in it."""

from collections.abc import Iterable

from vitwire.shared.fairness.shares import Path, Shares
from vitwire_server.scheduling.tickets import Entry, Priority, Ticket

_QUANTUM = 256
"""Tokens of one turn: a 512 x 512 image in most families."""


class Queue:
    """First in, first out within a request; requests of one priority share by deficit round robin.

    A single image next to a request of 200 is in the next batch. Interactive requests go before batch
    ones, but every sixteenth batch is led by a batch one if any waits, so that none starves. Not
    thread-safe: the scheduler's lock guards it.
    """

    def __init__(self) -> None:
        self._shares = Shares[Entry](_QUANTUM)
        self.nbytes = 0
        """Bytes of the pixels that wait."""

    def __len__(self) -> int:
        return len(self._shares)

    @property
    def tokens(self) -> int:
        """Tokens of the items that wait."""
        return self._shares.backlog

    def push(self, entry: Entry) -> None:
        """Append to the share of the entry's ticket."""
        self._shares.push(_path(entry.ticket), entry, max(1, entry.item.footprint.tokens))
        self.nbytes += entry.item.nbytes

    def window(self, limit: int, tokens: int) -> list[Entry]:
        """Entries to pack the next batch from: the first `limit` of at most `tokens` tokens, one at least.

        With more to choose from, the planner could fill the batch with later arrivals and postpone an earlier turn.
        Of a clip only the next part: a batch with more of them would hold back the first rows.
        """
        shown: dict[object, Entry] = {}
        for entry in self.peek(limit):
            if (entry.clip or entry) in shown:
                continue
            tokens -= entry.item.footprint.tokens
            if tokens < 0 and shown:
                break
            shown[entry.clip or entry] = entry
        return list(shown.values())

    def peek(self, limit: int) -> list[Entry]:
        """Up to `limit` entries in the order they should run."""
        return self._shares.order(limit)

    def tokens_ahead(self, priority: Priority, tokens: int) -> int:
        """Tokens that would run before a new request of `tokens` tokens is done, as things are now."""
        return self._shares.ahead(priority, tokens)

    def take(self, entries: Iterable[Entry]) -> None:
        """Remove entries that run now; their requests pay for them."""
        taken = list(entries)
        self._shares.take((_path(entry.ticket), entry) for entry in taken)
        self.nbytes -= sum(entry.item.nbytes for entry in taken)

    def drop(self, entry: Entry) -> None:
        """Remove an entry that will not run."""
        self._shares.drop(_path(entry.ticket), entry)
        self.nbytes -= entry.item.nbytes

    def remove(self, ticket: Ticket) -> list[Entry]:
        """Remove and return what still waits of one request."""
        removed = self._shares.remove(_path(ticket))
        self.nbytes -= sum(entry.item.nbytes for entry in removed)
        return removed


def _path(ticket: Ticket) -> Path:
    return ticket.priority, ticket
