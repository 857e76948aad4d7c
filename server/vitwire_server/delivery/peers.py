"""The agents of consumers. Used by the delivery thread only."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from vitwire.agents import problem_of
from vitwire_server.core.delivery import Consumer, Fallback

_log = logging.getLogger(__name__)


class State(Enum):
    """What may be sent to an agent."""

    VETTING = auto()
    """Nothing yet."""
    READY = auto()
    REFUSED = auto()
    """Nothing: its metadata cannot be loaded."""
    BROKEN = auto()
    """Nothing any more: a transfer failed or took too long."""


@dataclass(slots=True, eq=False)
class Peer:
    """A consumer's agent."""

    consumer: Consumer
    state: State = State.VETTING
    jobs: int = 0
    """Deliveries that wait, are under way, or took too long and have not ended."""
    transfers: int = 0
    """Those of them that were posted."""
    used: float = field(default_factory=time.monotonic)

    def refusal(self) -> Fallback | None:
        """Why nothing can be sent; None if it can, perhaps later."""
        match self.state:
            case State.REFUSED:
                return Fallback.REFUSED
            case State.BROKEN:
                return Fallback.TIMEOUT if self.transfers else Fallback.FAILED
            case _:
                return None


class Peers:
    """At most `most` agents by name. An agent belongs to the principal that named it first."""

    def __init__(self, most: int, idle_seconds: float, disconnect: Callable[[str], None]) -> None:
        """An agent that is not used for `idle_seconds` is disconnected."""
        self._most = most
        self._idle_seconds = idle_seconds
        self._disconnect = disconnect
        self._peers: dict[str, Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def find(self, consumer: Consumer) -> Peer | Fallback:
        """The consumer's agent, to be vetted if it is new; or why it cannot be used."""
        if problem := problem_of(consumer.agent, consumer.metadata):
            _log.info("a NIXL agent is refused: %s", problem)
            return Fallback.REFUSED
        peer = self._peers.get(consumer.agent)
        if peer is None:
            if len(self._peers) >= self._most and not self._make_room():
                return Fallback.BUSY
            peer = self._peers[consumer.agent] = Peer(consumer)
        elif (peer.consumer.principal, peer.consumer.digest) != (consumer.principal, consumer.digest):
            _log.info("a NIXL agent is refused: its name is in use")
            return Fallback.REFUSED
        peer.used = time.monotonic()
        return peer.refusal() or peer

    def remove_unused(self) -> None:
        """Disconnect agents that are broken, or were idle for long, once nothing is under way to them."""
        oldest = time.monotonic() - self._idle_seconds
        for peer in [each for each in self._idle() if each.state is State.BROKEN or each.used < oldest]:
            self._drop(peer)

    def clear(self) -> None:
        """Forget all agents: they were disconnected together."""
        for peer in self._peers.values():
            peer.state = State.BROKEN
        self._peers.clear()

    def _make_room(self) -> bool:
        """Disconnect the agent that was idle for longest; False if all are in use."""
        peer = min(self._idle(), key=lambda each: each.used, default=None)
        if peer:
            self._drop(peer)
        return peer is not None

    def _idle(self) -> Iterator[Peer]:
        return (peer for peer in self._peers.values() if not peer.jobs and peer.state is not State.VETTING)

    def _drop(self, peer: Peer) -> None:
        del self._peers[peer.consumer.agent]
        if peer.state is not State.REFUSED:  # else it was never added
            self._disconnect(peer.consumer.agent)
