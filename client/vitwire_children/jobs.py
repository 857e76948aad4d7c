"""Child processes that do jobs on what strangers send, as their parent sees them. Standard library only.

A job goes to the child pickled, and its answer comes back as JSON, with bytes behind either: the parent is trusted, its
child is not. One that does not answer as it should is killed.
"""

import asyncio
import json
import logging
import os
import pickle
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, Self

from vitwire_children import spawn
from vitwire_children.confine import warn
from vitwire_children.serving import LENGTH, Fault, NotDone

_log = logging.getLogger(__name__)
_START_SECONDS = 60.0
_MAX_HEAD = 2 << 20
"""Bytes of an answer's JSON."""
_TOO_LARGE = "takes more memory than allowed"
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


class Program(NamedTuple):
    """What a child runs, and what it inherits."""

    module: str
    """Calls `serving.serve`."""
    arguments: Sequence[object] = ()
    """After the descriptor of the socket."""
    kept: Sequence[str] = ()
    """Variables in addition to what `spawn.environment` keeps."""
    descriptors: Sequence[int] = ()
    stderr: int | None = None
    """Where it writes until it is confined; None for this process's."""


class Child:
    """Does one job at a time. Used on one event loop."""

    noun = "child"
    """Its name in the log."""
    error: ClassVar[type[Exception]] = NotDone
    """What jobs raise, which is made again with its arguments."""

    def __init__(self, process: Process, link: socket.socket) -> None:
        self.process = process
        self._link = link
        self._answer: asyncio.Task[Any] | None = None
        """To the last job. A separate task, as a caller that is cancelled must not lose the answer."""

    @classmethod
    async def start(
        cls, program: Program, set_up: Callable[[], Awaitable[object]] | None = None, wall: float = _START_SECONDS
    ) -> Self:
        """A child that is confined. It loads its libraries while its setup is awaited, if there is one.

        Raises NotDone, also `wall` seconds after that.
        """
        child = None
        try:
            with spawn.connected() as (link, theirs):
                command = spawn.program(program.module, theirs.fileno(), *program.arguments)
                descriptors = (theirs.fileno(), *program.descriptors)
                options = spawn.options(spawn.environment(*program.kept), descriptors) | {"stderr": program.stderr}
                child = cls(await asyncio.create_subprocess_exec(*command, **options), link)
            if unconfined := await child.ask(await set_up() if set_up else None, wall=wall):
                warn(_log, str(unconfined))
        except BaseException as error:
            if child:
                await child.close()
            if isinstance(error, OSError):
                raise NotDone(Fault.LOST, f"its process cannot be started: {error}") from error
            raise
        return child

    async def ask(self, job: object, *blobs: bytes, wall: float, seconds: float = 0.0, max_bytes: int = 0) -> Any:  # noqa: ANN401 - JSON
        """The answer to a job, with `max_bytes` of bytes at most: tuples arrive as lists, bytes as bytearrays.

        The job may take `wall` seconds, and `seconds` of processor time unless 0. Raises the job's error, or
        NotDone. A caller that is cancelled leaves the child at work: `idle` waits for it.
        """
        self._answer = asyncio.create_task(self._exchange(job, blobs, wall, seconds, max_bytes))
        self._answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())  # nobody may await it
        return await asyncio.shield(self._answer)

    async def idle(self) -> None:
        """Wait until the last job is done, or the child has ended."""
        if self._answer and not self._answer.done():
            await asyncio.wait([self._answer])

    @property
    def is_busy(self) -> bool:
        """True while a job awaits its answer."""
        return self._answer is not None and not self._answer.done()

    @property
    def is_alive(self) -> bool:
        """True until the process ends."""
        return self.process.returncode is None and spawn.is_open(self._link)

    async def close(self) -> None:
        """Kill the process. Its end of the socket is then closed: a wait for its answer ends."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):  # `process.kill` may reap it, so that asyncio loses its exit status
                os.kill(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        self._link.close()

    async def _exchange(self, job: object, blobs: Sequence[bytes], wall: float, seconds: float, max_bytes: int) -> Any:  # noqa: ANN401 - JSON
        message = pickle.dumps((job, seconds, [len(blob) for blob in blobs]))
        try:
            async with asyncio.timeout(wall):
                for part in (LENGTH.pack(len(message)) + message, *blobs):
                    await asyncio.get_running_loop().sock_sendall(self._link, part)
                answer = await self._received(max_bytes)
        except TimeoutError as error:
            await self.close()
            raise NotDone(Fault.LOST, f"its process did not respond for {wall:g} s") from error
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            await self.close()
            raise self._ended(seconds) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _received(self, max_bytes: int) -> Any:  # noqa: ANN401 - JSON
        """Raises OSError for a broken connection, and ValueError or the like for a malformed answer."""
        (length,) = LENGTH.unpack(await self._filled(bytearray(LENGTH.size)))
        if length > _MAX_HEAD:
            raise ValueError("an answer that is too long")
        blobs: list[bytearray] = []

        def inserted(value: dict[str, Any]) -> object:
            nonlocal max_bytes
            if "error" in value:
                return self.error(*value["error"]) if value["error"] else NotDone(Fault.TOO_LARGE, _TOO_LARGE)
            if not 0 <= value["bytes"] <= max_bytes:
                raise ValueError("an answer that is too long")
            max_bytes -= value["bytes"]
            blobs.append(bytearray(value["bytes"]))
            return blobs[-1]

        answer = json.loads(await self._filled(bytearray(length)), object_hook=inserted)
        for blob in blobs:
            await self._filled(blob)
        return answer

    async def _filled(self, received: bytearray) -> bytearray:
        with memoryview(received) as view:
            at = 0
            while at < len(view):
                count = await asyncio.get_running_loop().sock_recv_into(self._link, view[at:])
                if not count:
                    raise ConnectionError("the child has ended")
                at += count
        return received

    def _ended(self, seconds: float) -> Exception:
        number = -(self.process.returncode or 0)
        if number == signal.SIGPROF:
            return NotDone(Fault.TOO_SLOW, f"takes more than {seconds:.3g} s of processor time")
        if number in _CRASHES:
            return NotDone(Fault.CRASHED, "crashed its process")
        return NotDone(Fault.LOST, f"its process ended unexpectedly (exit {self.process.returncode})")


async def done_by(program: Program, job: object, *, wall: float, seconds: float = 0.0) -> Any:  # noqa: ANN401 - JSON
    """The answer of a child that does this job alone; see `Child`. Raises NotDone."""
    child = await Child.start(program, wall=wall)
    try:
        return await child.ask(job, wall=wall, seconds=seconds)
    finally:
        await child.close()
