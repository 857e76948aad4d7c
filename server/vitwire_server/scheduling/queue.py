"""Items waiting for the engine, a share per request."""

from collections import OrderedDict, deque

from vitwire_server.scheduling.tickets import Entry, Ticket


class Queue:
    """First in, first out within a request; requests take turns, one item each.

    A request of 200 images therefore delays a single image by one item, not by 200. Not
    thread-safe: the scheduler's lock guards it.
    """

    def __init__(self) -> None:
        self._shares: OrderedDict[Ticket, deque[Entry]] = OrderedDict()
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
        self._shares.setdefault(entry.ticket, deque()).append(entry)
        self._count(entry, 1)

    def take(self, limit: int) -> list[Entry]:
        """Remove and return up to `limit` entries, one per request in turn."""
        taken: list[Entry] = []
        while self._shares and len(taken) < limit:
            ticket, share = self._shares.popitem(last=False)
            taken.append(share.popleft())
            if share:
                self._shares[ticket] = share
        for entry in taken:
            self._count(entry, -1)
        return taken

    def remove(self, ticket: Ticket) -> list[Entry]:
        """Remove and return what still waits of one request."""
        removed = list(self._shares.pop(ticket, ()))
        for entry in removed:
            self._count(entry, -1)
        return removed

    def _count(self, entry: Entry, sign: int) -> None:
        self._items += sign
        self._nbytes += sign * len(entry.item.pixels.data)
