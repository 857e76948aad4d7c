"""The agents of consumers, and which sender writes to which. Used by the delivery thread only."""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from vitwire.shared.agents import problem_of
from vitwire_children.restarts import Restarts
from vitwire_server.core.delivery import Consumer, Fallback
from vitwire_server.delivery.senders import Sender, Senders

_log = logging.getLogger(__name__)
_MOST_NEW = 16
"""New agents of one principal at a time."""
_MOST_REFUSED = 4096
"""Digests of metadata that are remembered."""
_TRIALS = 4
"""First deliveries at a time."""
_TRIALS_PER_PRINCIPAL = 2


class State(Enum):
    """Stage of an agent, which decides what may be sent to it."""

    NEW = auto()
    """One delivery at a time, by a sender that delivers nothing else."""
    READY = auto()
    REFUSED = auto()
    """Nothing: its metadata cannot be loaded, or ended a process."""
    BROKEN = auto()
    """Nothing any more: a transfer failed or took too long."""


@dataclass(slots=True, eq=False)
class Peer:
    """A consumer's agent."""

    consumer: Consumer
    state: State = State.NEW
    trial: Sender | None = None
    """The sender of the first delivery."""
    began: float = 0.0
    """When the state allowed more than before."""
    jobs: int = 0
    """Deliveries that wait, are under way, or took too long and have not ended."""
    transfers: int = 0
    """Jobs whose transfer was posted."""
    used: float = field(default_factory=time.monotonic)

    @property
    def is_untried(self) -> bool:
        """Whether its first delivery has not begun."""
        return self.state is State.NEW and self.trial is None

    def refusal(self) -> Fallback | None:
        """The reason for sending nothing; None if rows can be sent, perhaps later."""
        match self.state:
            case State.REFUSED:
                return Fallback.REFUSED
            case State.BROKEN:
                return Fallback.TIMEOUT if self.transfers else Fallback.FAILED
            case _:
                return None


class Peers:
    """At most `most` agents by name. An agent belongs to the principal that named it first."""

    def __init__(self, most: int, idle_seconds: float, disconnect: Callable[[Peer], None]) -> None:
        """An agent that is not used for `idle_seconds` is disconnected."""
        self._most = most
        self._idle_seconds = idle_seconds
        self._disconnect = disconnect
        self._peers: dict[str, Peer] = {}
        self._refused: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def find(self, consumer: Consumer) -> Peer | Fallback:
        """The consumer's agent, to be vetted if it is new; or why it cannot be used."""
        if problem := problem_of(consumer.agent, consumer.metadata):
            _log.info("a NIXL agent is refused: %s", problem)
            return Fallback.REFUSED
        if consumer.digest in self._refused:
            return Fallback.REFUSED
        peer = self._peers.get(consumer.agent)
        if peer is None:
            if self._new(consumer.principal) >= _MOST_NEW:
                return Fallback.BUSY
            if len(self._peers) >= self._most and not self._make_room():
                return Fallback.BUSY
            peer = self._peers[consumer.agent] = Peer(consumer)
        elif (peer.consumer.principal, peer.consumer.digest) != (consumer.principal, consumer.digest):
            _log.info("a NIXL agent is refused: its name is in use")
            return Fallback.REFUSED
        peer.used = time.monotonic()
        return peer.refusal() or peer

    def refuse(self, peer: Peer) -> None:
        """Never again send to an agent with this metadata."""
        peer.state = State.REFUSED
        self._refused[peer.consumer.digest] = None
        if len(self._refused) > _MOST_REFUSED:
            self._refused.popitem(last=False)

    def remove_unused(self) -> None:
        """Disconnect agents that are broken, or were idle for long, once nothing is under way to them."""
        oldest = time.monotonic() - self._idle_seconds
        for peer in [each for each in self._idle() if each.state is State.BROKEN or each.used < oldest]:
            self._drop(peer)

    def has(self, principal: str) -> bool:
        """Whether there are agents of a principal that can be sent to."""
        return any(each.consumer.principal == principal and not each.refusal() for each in self._peers.values())

    def _new(self, principal: str) -> int:
        return sum(each.state is State.NEW and each.consumer.principal == principal for each in self._peers.values())

    def _make_room(self) -> bool:
        """Disconnect the agent that was idle for longest; False if all are in use."""
        peer = min(self._idle(), key=lambda each: each.used, default=None)
        if peer:
            self._drop(peer)
        return peer is not None

    def _idle(self) -> Iterator[Peer]:
        return (peer for peer in self._peers.values() if not peer.jobs)

    def _drop(self, peer: Peer) -> None:
        del self._peers[peer.consumer.agent]
        self._disconnect(peer)


class Assignments:
    """One sender for the first delivery to each agent, then one for all agents of a principal."""

    def __init__(self, senders: Senders, most: int) -> None:
        """At most `most` principals have a sender."""
        self._senders = senders
        self._most = most
        self.shared: dict[str, Sender] = {}
        """By principal."""
        self._trials: dict[Sender, Peer] = {}
        self._restarts: dict[str, Restarts] = {}
        """After the end of a principal's sender."""

    def sender_of(self, peer: Peer) -> Sender | None:
        """The sender that writes to an agent; None while there is none."""
        if peer.state is State.NEW:
            return peer.trial
        principal = peer.consumer.principal
        sender, restarts = self.shared.get(principal), self._restarts.get(principal)
        if sender is None and len(self.shared) < self._most and (restarts is None or restarts.is_over):
            sender = self._senders.take()
            if sender:
                self.shared[principal] = sender
            self._senders.keep(1)
        return sender

    def is_trial(self, sender: Sender) -> bool:
        """Whether it makes a first delivery."""
        return sender in self._trials

    def begin_trials(self, due: list[Peer]) -> None:
        """Take senders for new agents, first for the principals that have the fewest."""
        running = Counter(each.consumer.principal for each in self._trials.values())
        while due and len(self._trials) < _TRIALS:
            peer = min(due, key=lambda each: running[each.consumer.principal])
            principal = peer.consumer.principal
            if running[principal] >= _TRIALS_PER_PRINCIPAL:
                return
            self._senders.keep(min(len(due), _TRIALS))
            sender = self._senders.take()
            if sender is None:
                return
            peer.trial, peer.began = sender, time.monotonic()
            self._trials[sender] = peer
            running[principal] += 1
            due.remove(peer)

    def ended(self, sender: Sender, peer: Peer) -> None:
        """A delivery has ended. The sender of a first one becomes its principal's if that has none."""
        if not self._trials.pop(sender, None):
            return
        peer.trial = None
        if peer.state is State.NEW:
            peer.state, peer.began = State.READY, time.monotonic()
            if peer.consumer.principal not in self.shared and len(self.shared) < self._most:
                self.shared[peer.consumer.principal] = sender
                return
        self._senders.end(sender)

    def lose(self, sender: Sender, *, is_to_blame: bool) -> Peer | None:
        """A sender has ended, or is about to; if by itself, its principal's next one has to wait.

        Returns the agent that it made the first delivery to.
        """
        peer = self._trials.pop(sender, None)
        if peer:
            peer.trial, peer.state = None, State.BROKEN
        for principal in [each for each, its in self.shared.items() if its is sender]:
            del self.shared[principal]
            if is_to_blame:
                self._restarts.setdefault(principal, Restarts()).failed()
        return peer
