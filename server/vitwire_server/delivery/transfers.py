"""Deliveries to consumers, from the first to a new agent to the release of the rows. One thread uses them.

The first delivery to an agent is made by a sender that delivers nothing else, since UCX may end the process on what a
client says. Agents that passed it share one sender per principal. If that sender dies, only its deliveries are lost.
A transfer that takes too long is answered, and its rows are kept until it ends, as UCX may still read them.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from vitwire.shared.agents import AgentError, Memory
from vitwire.shared.regions import Region
from vitwire_server.core.delivery import Fallback, MemoryKind, Placing, Rows
from vitwire_server.delivery.messages import Add, Ended, FromSender, Outbox, Remove, Write
from vitwire_server.delivery.peers import Assignments, Peer, Peers, State
from vitwire_server.delivery.senders import Sender, Senders

_log = logging.getLogger(__name__)
_CLEANING_SECONDS = 0.1
_SILENT_SECONDS = 2.0
"""After which a sender with transfers hangs."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a courier."""

    seconds: float = 5.0
    """Most that a delivery may take."""
    waiting_seconds: float = 5.0
    """Most that a delivery waits for the first one to its agent, or for a sender."""
    agents: int = 1024
    idle_seconds: float = 60.0
    """After which an unused agent is disconnected."""
    deliveries: int = 1024
    """Most that wait or are under way."""
    transfers_per_agent: int = 32
    principals: int = 16
    """Most that have a sender."""
    staging_bytes: int = 256 << 20
    """Room for copies of rows on the host, in each sender."""
    overdue: int = 64
    overdue_bytes: int = 128 << 20
    """Transfers that took too long and have not ended, and their bytes, before their sender is replaced."""


@dataclass(slots=True, eq=False)
class Job:
    """One delivery."""

    placing: Placing
    rows: Rows
    started: float
    peer: Peer | None = None
    sender: Sender | None = None
    """The sender of a delivery that is under way."""
    copy: Region | None = None
    """A copy of the rows in the sender's staging memory; the rows are released already."""
    posted: float = 0.0
    is_overdue: bool = False
    """The transfer took too long, and was answered, but has not ended."""

    def is_late(self, bounds: Bounds) -> bool:
        """Whether it takes too long, since it was accepted, was posted, or its agent was found to be usable."""
        assert self.peer, "it was accepted"
        limit = bounds.waiting_seconds if self.peer.is_untried else bounds.seconds
        return time.monotonic() - max(self.started, self.posted, self.peer.began) > limit

    def release(self) -> None:
        """Nothing reads the rows any more."""
        if not self.copy:
            self.rows.release()
        if self.peer:
            self.peer.jobs -= 1
            if self.sender:
                self.peer.transfers -= 1


Answer = Callable[[Job, Fallback | None], None]
"""Called once for each job, with None if its rows are in place."""


class Transfers:
    """All deliveries that have begun."""

    def __init__(self, bounds: Bounds, answer: Answer) -> None:
        self._bounds = bounds
        self._answer = answer
        self.senders = Senders(bounds.staging_bytes)
        self._outbox: Memory | None = None
        self.peers = Peers(bounds.agents, bounds.idle_seconds, self._disconnect)
        self.waiting: list[Job] = []
        """Deliveries that `advance` may begin."""
        self._posted: dict[int, Job] = {}
        self._numbers = count()
        self._assignments = Assignments(self.senders, bounds.principals)
        self._cleaned = 0.0

    def add_device(self, memory: Memory, outbox: Outbox) -> None:
        """Deliver from the outbox, whose memory in this process is `memory`. Raises AgentError."""
        self.senders.start(outbox)
        self._outbox = memory

    def accept(self, job: Job) -> None:
        peer = self._refusal(job.rows) or self.peers.find(job.placing.consumer)
        if isinstance(peer, Fallback):
            self._end(job, peer)
            return
        job.peer = peer
        peer.jobs += 1
        self.waiting.append(job)

    def receive(self, sender: Sender, messages: list[FromSender] | None) -> None:
        """A sender sent something, or has ended."""
        if self.senders.is_spare(sender):
            try:
                self.senders.started(sender, messages)
            except AgentError as error:
                _log.warning("%s", error)
            return
        for message in messages or []:
            if isinstance(message, Ended):
                job = self._posted.get(message.number)
                if job and job.sender is sender:
                    self._ended(message.number, job, message)
        if messages is None:
            _log.warning("a sender has ended: embeddings under way are sent in responses")
            self._lose(sender, is_to_blame=self.senders.is_running)

    def advance(self) -> bool:
        """Begin what can begin, and clean up; returns whether a job began or ended."""
        before = len(self.waiting)
        new = (job.peer for job in self.waiting if job.peer and job.peer.is_untried and job.rows.is_ready())
        self._assignments.begin_trials(list(dict.fromkeys(new)))  # in order of arrival
        waiting, self.waiting = self.waiting, []
        self.waiting += [job for job in waiting if not self._post(job)]
        if (now := time.monotonic()) > self._cleaned + _CLEANING_SECONDS:
            self._cleaned = now
            self._end_late()
            self.peers.remove_unused()
            for principal, sender in list(self._assignments.shared.items()):
                if not self.peers.has(principal):
                    self._lose(sender, is_to_blame=False)
            self.senders.keep(1)
        return before != len(self.waiting)

    def close(self) -> None:
        self.senders.close()
        jobs = [*self.waiting, *self._posted.values()]
        self.waiting, self._posted = [], {}
        for job in jobs:
            self._end(job, Fallback.OFF)

    def _post(self, job: Job) -> bool:
        """Post a waiting job, or end it; False if it has to wait on."""
        peer = job.peer
        assert peer, "only jobs with a peer wait"
        if refusal := peer.refusal() or (Fallback.TIMEOUT if job.is_late(self._bounds) else None):
            self._end(job, refusal)
            return True
        most = 1 if peer.state is State.NEW else self._bounds.transfers_per_agent
        if peer.transfers >= most or not job.rows.is_ready():
            return False
        sender = self._assignments.sender_of(peer)
        return sender is not None and self._sent(job, peer, sender)

    def _sent(self, job: Job, peer: Peer, sender: Sender) -> bool:
        """Send a job to a sender; False if there is no room for it."""
        consumer, region = peer.consumer, job.placing.region
        if consumer.agent not in sender.agents:
            if not sender.send(Add(consumer.agent, consumer.metadata)):
                return False
            sender.agents.add(consumer.agent)
        if job.rows.device is None:
            job.copy = sender.staging.copied(job.rows)
            if job.copy is None:
                return False
            offset = job.copy.offset
        else:
            assert self._outbox, "rows that cannot be sent were refused"
            offset = job.rows.address - self._outbox.address
        number, nbytes = next(self._numbers), job.rows.nbytes
        device = consumer.device if consumer.memory is MemoryKind.DEVICE else None
        if not sender.send(Write(number, consumer.agent, offset, nbytes, consumer.address + region.offset, device)):
            if job.copy:
                sender.staging.give_back(job.copy)
            job.copy = None
            return False
        if job.copy:
            job.rows.release()
        job.sender, job.posted = sender, time.monotonic()
        peer.transfers += 1
        self._posted[number] = job
        return True

    def _ended(self, number: int, job: Job, message: Ended) -> None:
        """The transfer of a job is done, or failed."""
        del self._posted[number]
        sender, peer = job.sender, job.peer
        assert sender, "it was posted"
        assert peer, "it was posted"
        failure: Fallback | None = None
        if message.fault:
            failure = Fallback.REFUSED if message.refused else Fallback.FAILED
            _log.info("a transfer to a NIXL agent failed, and the agent is no longer used: %s", message.fault)
            if peer.state is not State.REFUSED:
                peer.state = State.REFUSED if message.refused else State.BROKEN
        if job.copy:
            sender.staging.give_back(job.copy)
        self._end(job, failure)
        self._assignments.ended(sender, peer)

    def _lose(self, sender: Sender, *, is_to_blame: bool) -> None:
        """A sender has ended or is killed; if its agents may have caused that, they are refused from now on."""
        lost = [job for job in self._posted.values() if job.sender is sender]
        self._posted = {number: job for number, job in self._posted.items() if job.sender is not sender}
        tried = self._assignments.lose(sender, is_to_blame=is_to_blame)
        if tried and is_to_blame:  # its metadata may have ended the sender before a transfer was posted
            self.peers.refuse(tried)
        for job in lost:
            assert job.peer, "it was posted"
            if is_to_blame:
                self.peers.refuse(job.peer)
            self._settle(job, job.peer.refusal() or Fallback.FAILED)

        def release() -> None:
            for job in lost:
                job.release()

        if sender.is_gone:
            release()
        else:
            self.senders.end(sender, release)

    def _end_late(self) -> None:
        """Answer transfers that take too long, and replace senders that hang or have too many of them."""
        overdue: dict[Sender, list[Job]] = {}
        for job in self._posted.values():
            if not job.is_late(self._bounds):
                continue
            assert job.sender, "it was posted"
            overdue.setdefault(job.sender, []).append(job)
            if not job.is_overdue and job.peer:
                _log.info("a transfer to a NIXL agent is not done after %g s", self._bounds.seconds)
                if job.peer.state is not State.REFUSED:
                    job.peer.state = State.BROKEN
                self._settle(job, Fallback.TIMEOUT)
                job.is_overdue = True
        for sender, jobs in overdue.items():
            hangs = time.monotonic() > sender.heard + _SILENT_SECONDS
            nbytes = sum(job.rows.nbytes for job in jobs)
            is_too_much = len(jobs) >= self._bounds.overdue or nbytes > self._bounds.overdue_bytes
            if hangs or is_too_much or self._assignments.is_trial(sender):
                _log.warning("a sender is replaced: %d of its transfers do not end", len(jobs))
                self._lose(sender, is_to_blame=hangs)

    def _refusal(self, rows: Rows) -> Fallback | None:
        """Why rows cannot be sent; None if they are in the outbox, or can be copied to staging memory."""
        if rows.device is None:
            return Fallback.BUSY if rows.nbytes > self._bounds.staging_bytes else None
        return None if self._outbox and rows.device == self._outbox.device else Fallback.OFF

    def _end(self, job: Job, failure: Fallback | None) -> None:
        """Answer a job, unless it was answered when it took too long, and release what it holds."""
        self._settle(job, failure)
        job.release()

    def _settle(self, job: Job, failure: Fallback | None) -> None:
        if job.peer:
            job.peer.used = time.monotonic()
        if not job.is_overdue:
            self._answer(job, failure)

    def _disconnect(self, peer: Peer) -> None:
        name = peer.consumer.agent
        if peer.trial:
            self._lose(peer.trial, is_to_blame=False)
        for sender in self._assignments.shared.values():
            if name in sender.agents and sender.send(Remove(name)):
                sender.agents.discard(name)
