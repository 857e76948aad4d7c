"""NIXL agents, shared by client and server. NIXL is imported when the first agent is made.

An agent has no progress thread of NIXL's, which would keep a core busy: its owner calls `progress`, or polls its
transfers, while any are in flight.
"""

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

from vitwire.shared.extras import remedy

_BACKEND = "UCX"
_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The metapackage chooses by torch's CUDA version; each of the others works without it."""
_MAX_NAME = 64
_MAX_METADATA = 64 << 10
MISSING = f"NIXL is not installed; {remedy('nixl')} (Linux only)"


class AgentError(Exception):
    """NIXL failed: it is not installed, or it refused or could not finish an operation."""


class Memory(NamedTuple):
    """A range of memory in some process; `device` is the number of its CUDA device, None on the host."""

    address: int
    nbytes: int
    device: int | None = None

    @property
    def kind(self) -> str:
        """NIXL's name of the kind of memory."""
        return "DRAM" if self.device is None else "VRAM"

    def part(self, offset: int, nbytes: int) -> "Memory":
        """A range within this one. Raises ValueError if it is not."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} are not within {self.nbytes} bytes")
        return Memory(self.address + offset, nbytes, self.device)


def is_installed() -> bool:
    """Whether NIXL can be imported; nothing is imported."""
    return any(find_spec(name) for name in _PACKAGES)


def problem_of(name: str, metadata: bytes) -> str | None:
    """The problem with the metadata of an agent that claims to be `name`; None if they agree.

    NIXL loads metadata under the name inside it, so it must be known before.
    """
    if not 0 < len(name) <= _MAX_NAME or not name.isascii() or not name.replace("-", "").isalnum():
        return f"its name must have 1 to {_MAX_NAME} letters, digits and hyphens"
    if len(metadata) > _MAX_METADATA:
        return f"its metadata has {len(metadata)} bytes, at most {_MAX_METADATA} are accepted"
    if not metadata.startswith(b"nixlSerDes|Agent" + len(name).to_bytes(8, "little") + name.encode() + b"|"):
        return "its metadata does not belong to a NIXL agent of this name"
    return None


@contextmanager
def _refused(errors: tuple[type[Exception], ...], what: str = "") -> Iterator[None]:
    """Errors of NIXL in the block become AgentError, whose message begins with `what`."""
    try:
        yield
    except errors as error:
        raise AgentError(f"{what}{error}") from None


class Transfer:
    """A write that was posted. `release` it once, by the thread that uses its agent."""

    def __init__(self, agent: Any, handle: Any, errors: tuple[type[Exception], ...]) -> None:  # noqa: ANN401 - untyped
        self._agent = agent
        self._handle = handle
        self._errors = errors

    def is_done(self) -> bool:
        """Whether all bytes were written. Raises AgentError if the transfer failed."""
        with _refused(self._errors):
            state = self._agent.check_xfer_state(self._handle)
        if state not in ("DONE", "PROC"):
            raise AgentError("the transfer failed")
        return bool(state == "DONE")

    def release(self) -> None:
        """Forget the transfer. One that is not done may still read its source memory until its agent is closed."""
        with _refused(self._errors):
            self._agent.release_xfer_handle(self._handle)


class Agent:
    """A NIXL agent. Used by one thread at a time."""

    def __init__(self, name: str) -> None:
        """Raises AgentError if NIXL is missing or cannot start."""
        api = load()
        self._errors = _errors(api)
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
        with _refused(self._errors, "the NIXL agent cannot start: "):
            self._agent = api.nixl_agent(name, config)
        if _BACKEND not in self._agent.backends:
            raise AgentError(f"the NIXL agent cannot start: its backend {_BACKEND} is missing")
        self.name = name

    @property
    def metadata(self) -> bytes:
        """Metadata with which other agents can write into this agent's registered memory."""
        return bytes(self._agent.get_agent_metadata())

    def register(self, memory: Memory) -> None:
        """Make memory usable as source and target of transfers. Raises AgentError."""
        parts = [(memory.address, memory.nbytes, memory.device or 0, "")]
        with _refused(self._errors, f"{memory.nbytes} bytes of memory cannot be registered: "):
            self._agent.register_memory(parts, mem_type=memory.kind)

    def add(self, metadata: bytes) -> str:
        """Add a remote agent; returns its name. Invalid metadata may end the process. Raises AgentError."""
        with _refused(self._errors):
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, name: str) -> None:
        """Disconnect from a remote agent. Raises AgentError."""
        with _refused(self._errors):
            self._agent.remove_remote_agent(name)

    def write(self, source: Memory, target: Memory, name: str) -> Transfer:
        """Start to write `source` into as many bytes at `target`, in the memory of agent `name`. Raises AgentError."""
        agent = self._agent
        with _refused(self._errors):
            local, remote = (
                agent.get_xfer_descs([(each.address, source.nbytes, each.device or 0)], mem_type=each.kind)
                for each in (source, target)
            )
            handle = agent.initialize_xfer("WRITE", local, remote, name)
        transfer = Transfer(agent, handle, self._errors)
        try:
            with _refused(self._errors):
                agent.transfer(handle)
        except AgentError:
            transfer.release()
            raise
        return transfer

    def progress(self) -> None:
        """Advance connections and writes by other agents. Raises AgentError."""
        with _refused(self._errors):
            self._agent.get_new_notifs()

    def close(self) -> None:
        """Close every connection, once all transfers were released; source memory is not read any more."""
        self._agent = None


def load() -> ModuleType:
    """Import NIXL's Python API. Raises AgentError if it is missing."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # failed transfers are errors of ours, not lines on stderr
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    raise_exceptions = logging.raiseExceptions
    for package in _PACKAGES:
        if find_spec(package) is None:
            continue
        try:
            importlib.import_module(package)
            api = importlib.import_module(f"{package}._api")
        except ImportError:
            continue
        logging.raiseExceptions = raise_exceptions  # NIXL sets it
        log = logging.getLogger("nixl")
        log.handlers.clear()  # it writes to stdout
        log.setLevel(logging.WARNING)
        log.propagate = True
        return api
    raise AgentError(MISSING)


def _errors(api: ModuleType) -> tuple[type[Exception], ...]:
    """The exception types of NIXL's bindings, which have no common base."""
    own = [each for each in vars(api.nixlBind).values() if isinstance(each, type) and issubclass(each, Exception)]
    return (*own, RuntimeError, ValueError)
