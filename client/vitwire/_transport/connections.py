"""Which connection carries a call, for both clients; opening and closing channels is up to their transports."""

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from vitwire._transport.channel import BULK_OPTIONS, ChannelOptions, routed_options
from vitwire._transport.protocol import Part

C = TypeVar("C")

CONNECTIONS = 4
"""Default number of connections of each kind."""
_AVOIDED_SECONDS = 1.0
"""Seconds that calls avoid a connection after it failed."""
_CALL_BYTES = 64 << 10
"""Counted for each call besides its tensors, so that small calls are spread as well."""


@dataclass(slots=True, eq=False)
class Connection(Generic[C]):
    """A channel for bulk calls: one HTTP/2 connection to each address of the target."""

    channel: C
    is_routed: bool = False
    """Whether the channel chooses replicas by the hint of a call, rather than round robin."""
    load: int = 0
    """Bytes of the calls in flight, in both directions."""
    _avoided_until: float = 0.0

    def avoid(self) -> None:
        """After a failure: prefer other connections for a while. A broken one has nothing in flight and looks idle."""
        self._avoided_until = time.monotonic() + _AVOIDED_SECONDS

    @property
    def is_avoided(self) -> bool:
        return time.monotonic() < self._avoided_until


class Connections(Generic[C]):
    """The channels of one client: one for each kind of control call, up to `limit` for each kind of bulk call.

    A server may listen on one port with several processes. The kernel gives each connection to one of them, so a client
    reaches several processes only through several connections. Calls of one message and streams use different
    connections, so that large uploads do not delay small requests. Thread-safe.
    """

    def __init__(self, open_channel: Callable[[ChannelOptions], C], limit: int) -> None:
        self._open = open_channel
        self._limit = limit
        self._lock = threading.Lock()
        self.is_closed = False
        self._process: int | None = None
        """The process that opened the first channel; gRPC's threads do not survive a fork."""
        self._control: dict[ChannelOptions, C] = {}
        self._bulk: dict[tuple[bool, bool], list[Connection[C]]] = {}
        """By whether calls are streams, and whether they are routed by a hint."""

    def control(self, options: ChannelOptions) -> C:
        """The channel for short calls with these options. Raises RuntimeError after `close` or in a forked process."""
        with self._lock:
            self._check()
            if options not in self._control:
                self._control[options] = self._open(options)
            return self._control[options]

    @contextmanager
    def bulk(
        self, nbytes: int, *, stream: bool, routed: bool = False, again: Connection[C] | None = None
    ) -> Iterator[Connection[C]]:
        """The connection for a call that transfers `nbytes`, counted as in flight until the end of the block.

        routed: the call's hint decides about its replica.
        again: use this connection, if it chooses replicas as the call requires.
        Raises RuntimeError after `close` or in a forked process.
        """
        nbytes += _CALL_BYTES
        with self._lock:
            self._check()
            connection = again if again and again.is_routed is routed else self._choose(stream, routed)
            connection.load += nbytes
        try:
            yield connection
        finally:
            with self._lock:
                connection.load -= nbytes

    def common(self, parts: Collection[Part], *, stream: bool) -> Connection[C] | None:
        """The connection for the first attempts of a request's parts that are streams, or are not.

        They share it, so that its round robin sends them to different replicas. None for fewer than two parts.
        """
        if sum(part.one_message is not stream and not part.share.is_routed for part in parts) < 2:
            return None
        with self._lock:
            self._check()
            return self._choose(stream, routed=False)

    @property
    def is_forked(self) -> bool:
        """Whether the channels belong to the process that this one was forked from.

        Threads of that process may have held any lock at the fork, which nobody releases here.
        """
        return self._process not in (None, os.getpid())

    def close(self) -> list[C]:
        """Refuse further calls; returns the channels, for the caller to close. In a forked process, there are none."""
        if self.is_forked:
            self.is_closed = True
            return []
        with self._lock:
            self.is_closed = True
            return [*self._control.values(), *(each.channel for kind in self._bulk.values() for each in kind)]

    def _choose(self, stream: bool, routed: bool) -> Connection[C]:
        """The first idle connection, else a new one, else the one with the fewest bytes in flight."""
        connections = self._bulk.setdefault((stream, routed), [])
        best = min(connections, key=lambda each: (each.is_avoided, each.load), default=None)
        if best is None or ((best.load or best.is_avoided) and len(connections) < self._limit):
            best = Connection(self._open(routed_options() if routed else BULK_OPTIONS), routed)
            connections.append(best)
        return best

    def _check(self) -> None:
        if self.is_closed:
            raise RuntimeError("the client is closed")
        if self._process is None:
            self._process = os.getpid()
        elif self._process != os.getpid():
            raise RuntimeError("the client was used before this process was forked; make a client in each process")
