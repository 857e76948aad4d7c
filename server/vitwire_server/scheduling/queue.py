"""Items waiting for the engine, a share per request."""

from collections import OrderedDict
from collections.abc import Iterable

from vitwire_server.scheduling.tickets import Entry, Priority, Ticket

Share = dict[int, Entry]
"""Items of one request by their index, in the order they came."""


class Queue:
    """First in, first out within a request; requests of one priority take turns, one item each.

    A request of 200 images therefore delays a single image by one item, not by 200. Interactive
    requests go before batch ones. Not thread-safe: the scheduler's lock guards it.
    """

    def __init__(self) -> None:
        self._shares: dict[Priority, OrderedDict[Ticket, Share]] = {level: OrderedDict() for level in Priority}
        self._items = 0
        self._nbytes = 0

    def __len__(self) -> int:
        return self._items

    @property
    def nbytes(self) -> int:
        """Bytes of the pixels that wait."""
        return self._nbytes

    def push(self, entry: Entry) -> None:
        """Append to the share of the entry's ticket."""
        self._shares[entry.ticket.priority].setdefault(entry.ticket, {})[entry.index] = entry
        self._count(entry, 1)

    def peek(self, limit: int) -> list[Entry]:
        """Up to `limit` entries in the order they should run."""
        entries: list[Entry] = []
        for level in Priority:
            turns = [iter(share.values()) for share in self._shares[level].values()]
            while turns and len(entries) < limit:
                drawn = [(turn, next(turn, None)) for turn in turns[: limit - len(entries)]]
                entries += [entry for _, entry in drawn if entry]
                turns = [turn for turn, entry in drawn if entry] + turns[len(drawn) :]
        return entries

    def take(self, entries: Iterable[Entry]) -> None:
        """Remove entries that wait; their requests go to the end of the line."""
        for entry in entries:
            shares = self._shares[entry.ticket.priority]
            del shares[entry.ticket][entry.index]
            shares.move_to_end(entry.ticket)
            if not shares[entry.ticket]:
                del shares[entry.ticket]
            self._count(entry, -1)

    def remove(self, ticket: Ticket) -> list[Entry]:
        """Remove and return what still waits of one request."""
        removed = list(self._shares[ticket.priority].pop(ticket, {}).values())
        for entry in removed:
            self._count(entry, -1)
        return removed

    def _count(self, entry: Entry, sign: int) -> None:
        self._items += sign
        self._nbytes += sign * len(entry.item.pixels.data)
