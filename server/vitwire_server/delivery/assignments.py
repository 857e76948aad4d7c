"""Which sender writes to which agent. Used by the delivery thread only."""

import time
from collections import Counter

from vitwire_server.delivery.peers import Peer, State
from vitwire_server.delivery.senders import Delays, Sender, Senders

_TRIALS = 4
"""First deliveries at a time."""
_TRIALS_PER_PRINCIPAL = 2


class Assignments:
    """One sender for the first delivery to each agent, then one for all agents of a principal."""

    def __init__(self, senders: Senders, most: int) -> None:
        """At most `most` principals have a sender."""
        self._senders = senders
        self._most = most
        self.shared: dict[str, Sender] = {}
        """By principal."""
        self._trials: dict[Sender, Peer] = {}
        self._delays: dict[str, Delays] = {}
        """After the end of a principal's sender."""

    def sender_of(self, peer: Peer) -> Sender | None:
        """The sender that writes to an agent; None while there is none."""
        if peer.state is State.NEW:
            return peer.trial
        principal = peer.consumer.principal
        sender, delays = self.shared.get(principal), self._delays.get(principal)
        if sender is None and len(self.shared) < self._most and (delays is None or delays.is_over):
            sender = self._senders.take()
            if sender:
                self.shared[principal] = sender
            self._senders.keep(1)
        return sender

    def is_trial(self, sender: Sender) -> bool:
        """Whether it makes a first delivery."""
        return sender in self._trials

    def begin_trials(self, due: list[Peer]) -> None:
        """Take senders for new agents, in turns of principals."""
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
                self._delays.setdefault(principal, Delays()).failed()
        return peer
