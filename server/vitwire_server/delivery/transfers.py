"""Transfers to consumers, from the vetting of their agents to the release of the rows. One thread uses them.

A released transfer may still read its source memory, as UCX keeps it queued. So a transfer that takes too long is
answered, and its rows are kept until it ends. If too many do not end, closing the server's agent ends them all.
"""

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from vitwire.agents import Agent, AgentError, Memory, Transfer
from vitwire_server.core.delivery import Fallback, MemoryKind, Placing, Rows
from vitwire_server.delivery.peers import Peer, Peers, State
from vitwire_server.delivery.staging import Direct, Source, Staging, memory_of

_log = logging.getLogger(__name__)
_CLEANING_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a courier."""

    seconds: float = 5.0
    """Most that a delivery may take, once its agent was vetted."""
    vetting_seconds: float = 30.0
    """Most that a delivery waits for the vetting of its agent."""
    agents: int = 1024
    idle_seconds: float = 60.0
    """After which an unused agent is disconnected."""
    deliveries: int = 1024
    """Most that wait or are under way."""
    transfers_per_agent: int = 32
    staging_bytes: int = 256 << 20
    """Room for copies of rows in memory that is not registered."""
    overdue: int = 64
    overdue_bytes: int = 128 << 20
    """Transfers that took too long and have not ended, and their bytes, before the server's agent is replaced."""


@dataclass(slots=True, eq=False)
class Job:
    """One delivery."""

    placing: Placing
    rows: Rows
    started: float
    peer: Peer | None = None
    source: Source | None = None
    transfer: Transfer | None = None
    vetted: float = 0.0
    """When its agent was vetted, if it had to wait for that."""
    is_overdue: bool = False
    """The transfer took too long, and was answered, but has not ended."""


Vet = Callable[[bytes, Callable[[bool], None]], None]
"""Finds out whether metadata can be loaded, and calls back in the thread of the transfers."""
Answer = Callable[[Job, Fallback | None], None]
"""Called once for each job, with None if its rows are in place."""


class Transfers:
    """All deliveries that have begun."""

    def __init__(self, sources: Sequence[Memory], bounds: Bounds, vet: Vet, answer: Answer) -> None:
        self._bounds = bounds
        self._vet = vet
        self._answer = answer
        self._staging = Staging(bounds.staging_bytes)
        self._sources = [self._staging.memory, *sources]
        self._peers = Peers(bounds.agents, bounds.idle_seconds, self._disconnect)
        self._waiting: list[Job] = []
        self._posted: list[Job] = []
        self._agent: Agent | None = None
        self._cleaned = 0.0

    @property
    def is_active(self) -> bool:
        """Whether `advance` has work."""
        return bool(self._waiting or self._posted)

    @property
    def agents(self) -> int:
        """Number of consumers' agents."""
        return len(self._peers)

    def start(self) -> None:
        """Make the server's agent. Raises AgentError."""
        agent = Agent(f"vitwire-{uuid.uuid4().hex}")
        for memory in self._sources:
            agent.register(memory)
        self._agent = agent

    def register(self, memory: Memory) -> None:
        """Register more memory that rows are sent from. Raises AgentError."""
        assert self._agent, "started"
        self._agent.register(memory)
        self._sources.append(memory)

    def accept(self, job: Job) -> None:
        """Begin a delivery."""
        peer = self._peers.find(job.placing.consumer) if self._can_send(job.rows) else Fallback.BUSY
        if isinstance(peer, Fallback):
            self._end(job, peer)
            return
        if peer.state is State.VETTING and not peer.jobs:
            self._vet(peer.consumer.metadata, lambda accepted: self._vetted(peer, accepted=accepted))
        job.peer = peer
        peer.jobs += 1
        self._waiting.append(job)

    def advance(self) -> bool:
        """Post, poll and clean up; returns whether a job began or ended."""
        before = len(self._waiting), len(self._posted)
        waiting, self._waiting = self._waiting, []
        self._waiting += [job for job in waiting if not self._post(job)]
        posted, self._posted = self._posted, []
        self._posted += [job for job in posted if not self._has_ended(job)]
        self._bound_overdue()
        if (now := time.monotonic()) > self._cleaned + _CLEANING_SECONDS:
            self._cleaned = now
            self._peers.remove_unused()
        return before != (len(self._waiting), len(self._posted))

    def close(self) -> None:
        """End everything."""
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            self._end(job, Fallback.BUSY)
        self._close_agent()

    def _vetted(self, peer: Peer, *, accepted: bool) -> None:
        if peer.state is not State.VETTING:
            return  # all agents were disconnected in the meantime
        peer.state = State.REFUSED
        if accepted and self._agent:
            try:
                self._agent.add(peer.consumer.metadata)
                peer.state = State.READY
                for job in self._waiting:
                    if job.peer is peer:
                        job.vetted = time.monotonic()
            except AgentError as error:
                _log.info("a NIXL agent is refused: %s", error)

    def _post(self, job: Job) -> bool:
        """Post a waiting job, or end it; False if it has to wait on."""
        peer = job.peer
        assert peer, "only jobs with a peer wait"
        is_late = self._is_late(job)
        refusal = peer.refusal() or (Fallback.TIMEOUT if is_late else None)
        if refusal:
            self._end(job, refusal)
            return True
        can_start = peer.state is State.READY and peer.transfers < self._bounds.transfers_per_agent
        if not can_start or not job.rows.is_ready():
            return False
        job.source = self._source(job.rows)
        if job.source is None:
            return False
        try:
            job.transfer = self._written(job.source.memory, job.placing)
        except AgentError as error:
            self._break(job, error)
            self._end(job, Fallback.FAILED)
            return True
        peer.transfers += 1
        self._posted.append(job)
        return True

    def _can_send(self, rows: Rows) -> bool:
        """Whether rows are, or can be copied to, registered memory."""
        return self._is_registered(rows) or (rows.device is None and rows.nbytes <= self._bounds.staging_bytes)

    def _is_registered(self, rows: Rows) -> bool:
        return any(_contains(each, memory_of(rows)) for each in self._sources)

    def _source(self, rows: Rows) -> Source | None:
        """Registered memory with the rows; None while there is no room for a copy."""
        return Direct(rows) if self._is_registered(rows) else self._staging.copied(rows)

    def _written(self, source: Memory, placing: Placing) -> Transfer:
        """The transfer that was posted. Raises AgentError."""
        assert self._agent, "an agent that is ready was added to one"
        consumer = placing.consumer
        device = consumer.device if consumer.memory is MemoryKind.DEVICE else None
        memory = Memory(consumer.address, consumer.nbytes, device)
        return self._agent.write(source, memory.part(placing.region.offset, source.nbytes), consumer.agent)

    def _has_ended(self, job: Job) -> bool:
        """Whether a posted transfer is done, or failed; answers one that takes too long."""
        assert job.transfer, "the job was posted"
        failure: Fallback | None = None
        try:
            if not job.transfer.is_done():
                if not job.is_overdue and self._is_late(job):
                    job.is_overdue = True
                    self._break(job, AgentError(f"not done after {self._bounds.seconds:g} s"))
                    self._answer(job, Fallback.TIMEOUT)
                return False
        except AgentError as error:
            self._break(job, error)
            failure = Fallback.FAILED
        self._end(job, failure)
        return True

    def _break(self, job: Job, error: AgentError) -> None:
        """Use the job's agent no longer; it is disconnected once nothing is under way to it."""
        if job.peer and job.peer.state is not State.BROKEN:
            job.peer.state = State.BROKEN
            _log.info("a transfer to a NIXL agent failed, which is not used any more: %s", error)

    def _end(self, job: Job, failure: Fallback | None) -> None:
        """Release what a job holds, and answer it unless it was answered when it took too long."""
        _release_transfer(job)
        (job.source or job.rows).release()
        if job.peer:
            job.peer.jobs -= 1
            job.peer.used = time.monotonic()
        if not job.is_overdue:
            self._answer(job, failure)

    def _bound_overdue(self) -> None:
        """If too many transfers do not end, end all by closing the server's agent, and start a new one."""
        overdue = [job.rows.nbytes for job in self._posted if job.is_overdue]
        if len(overdue) < self._bounds.overdue and sum(overdue) <= self._bounds.overdue_bytes:
            return
        _log.warning("%d transfers do not end: the server's NIXL agent is replaced", len(overdue))
        self._close_agent()
        self.start()

    def _close_agent(self) -> None:
        jobs, self._posted = self._posted, []
        for job in jobs:
            _release_transfer(job)
        if self._agent:
            self._agent.close()
        self._agent = None
        self._peers.clear()
        for job in jobs:  # their sources are not read any more
            self._end(job, Fallback.FAILED)

    def _disconnect(self, name: str) -> None:
        assert self._agent, "it was added to an agent"
        try:
            self._agent.remove(name)
        except AgentError as error:
            _log.debug("a NIXL agent cannot be disconnected: %s", error)

    def _is_late(self, job: Job) -> bool:
        is_vetting = job.peer is not None and job.peer.state is State.VETTING
        limit = self._bounds.vetting_seconds if is_vetting else self._bounds.seconds
        return time.monotonic() - max(job.started, job.vetted) > limit


def _release_transfer(job: Job) -> None:
    if job.transfer and job.peer:
        with suppress(AgentError):
            job.transfer.release()
        job.transfer = None
        job.peer.transfers -= 1


def _contains(memory: Memory, part: Memory) -> bool:
    end = memory.address + memory.nbytes
    return memory.device == part.device and memory.address <= part.address <= part.address + part.nbytes <= end
