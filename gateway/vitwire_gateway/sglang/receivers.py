"""Addresses that SGLang's schedulers register for requests. One event loop uses it."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile

from vitwire_gateway.sglang.receiver_requests import Registration, refused

_MAX_REQUESTS = 8192
_MAX_HELD = 65536
"""Registrations of all requests together."""
_MAX_PER_REQUEST = 4096


@dataclass(slots=True)
class _Registered:
    """Registrations of one request; `last` is when it was last used, on the loop's clock, `name` who began it."""

    last: float
    name: str
    waiting: int = 0
    count: int = 0
    receivers: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Receivers:
    """Registrations by request. Each part takes one of every scheduler, whether they come before or after it.

    If there are too many, the oldest go that no part waits for, of the caller that has the most.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._requests: dict[str, _Registered] = {}
        self._held = 0

    def add(self, registration: Registration, name: str) -> None:
        """Keep a registration until a part takes it, or for the time limit. Raises ApiError."""
        entry = self._entry(registration.req_id, name)
        if entry.count and entry.count != registration.count:
            raise refused(f"receive_count: {entry.count} schedulers were announced before, got {registration.count}")
        if len(entry.receivers) >= _MAX_PER_REQUEST:
            raise refused("too many receivers are registered", 503)
        while self._held >= _MAX_HELD:
            self._make_room(entry)
        self._held += 1
        entry.count = registration.count
        entry.receivers.append(registration.receiver)
        entry.changed.set()

    async def take(self, req_id: str, name: str) -> list[str]:
        """The addresses of all schedulers of the request, once they registered. Raises ApiError after the limit."""
        entry = self._entry(req_id, name)
        entry.waiting += 1
        try:
            async with asyncio.timeout(self._seconds):
                while not (taken := self._distinct(entry)):
                    entry.changed.clear()
                    await entry.changed.wait()
            return taken
        except TimeoutError as error:
            have = f"{len(set(entry.receivers))} of {entry.count or 'an unknown number of'}"
            message = f"{have} schedulers registered for the embedding within {self._seconds:g} s"
            raise refused(message, 504) from error
        finally:
            entry.waiting -= 1
            self._drop_if_empty(req_id, entry)

    def take_registered(self, req_id: str) -> list[str]:
        """As `take`, without waiting; empty if some have not registered."""
        entry = self._requests.get(req_id)
        if entry is None:
            return []
        taken = self._distinct(entry)
        self._drop_if_empty(req_id, entry)
        return taken

    def _entry(self, req_id: str, name: str) -> _Registered:
        now = asyncio.get_running_loop().time()
        entry = self._requests.get(req_id)
        if entry is None:
            expired = takewhile(lambda each: each[1].last < now - self._seconds, self._requests.items())
            for forgotten in [each for each, other in expired if not other.waiting]:
                self._drop(forgotten)
            if len(self._requests) >= _MAX_REQUESTS:
                self._make_room()
            entry = self._requests[req_id] = _Registered(now, name)
        else:
            del self._requests[req_id]  # the least recently used stay in front
            self._requests[req_id] = entry
        entry.last = now
        return entry

    def _make_room(self, keep: _Registered | None = None) -> None:
        """Drop the oldest registrations of the caller that has the most. Raises ApiError if parts wait for all."""
        found: dict[str, str] = {}
        for req_id, entry in self._requests.items():
            if not entry.waiting and entry is not keep:
                found.setdefault(entry.name, req_id)
        if not found:
            raise refused("too many requests wait for their embeddings", 503)
        counts = Counter(entry.name for entry in self._requests.values())
        self._drop(found[max(found, key=counts.__getitem__)])

    def _drop_if_empty(self, req_id: str, entry: _Registered) -> None:
        if not entry.waiting and not entry.receivers:
            self._drop(req_id)

    def _drop(self, req_id: str) -> None:
        self._held -= len(self._requests.pop(req_id).receivers)

    def _distinct(self, entry: _Registered) -> list[str]:
        """One registration of each scheduler, taken out of the entry; empty if some are missing."""
        taken = list(dict.fromkeys(entry.receivers))[: entry.count]
        if not entry.count or len(taken) < entry.count:
            return []
        for receiver in taken:
            entry.receivers.remove(receiver)
        self._held -= len(taken)
        return taken
