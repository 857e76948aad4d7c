"""Work on what callers send that could not be bounded or ended here: it runs in processes that can be killed."""

import asyncio
import json
import logging
import os
import pickle
import signal
import socket
import struct
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from vitwire.shared.fairness.places import Place, Places
from vitwire_children.confine import warn
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.callers import Caller

_log = logging.getLogger(__name__)
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "HOME", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_FEWEST, _MOST = 3, 8
_START_SECONDS = 60.0
_WORK_SECONDS = 10.0
"""Of processor time for one job."""
_WALL_SECONDS = 120.0
_MAX_HEAD = 2 << 20
_LENGTH = struct.Struct("!I")
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
_PIXEL_BYTES, _BODY_BYTES = 8, 12
"""Memory that reading takes, for each pixel of an image or byte of a body; Pillow opens a WebP with two canvases."""


def memory_for(pixels: int, body_bytes: int) -> int:
    """Memory that a worker needs for the largest image or body."""
    return (256 << 20) + max(_PIXEL_BYTES * pixels, _BODY_BYTES * body_bytes)


def _gone(reason: str) -> ApiError:
    return ApiError(503, f"the process that reads requests is gone: {reason}", "router_failed")


@dataclass(slots=True, eq=False)
class _Worker:
    """Does one job at a time."""

    process: Process
    link: socket.socket

    @classmethod
    async def start(cls, module: str, memory: int) -> Self:
        """Raises ApiError."""
        here, there = socket.socketpair()
        here.setblocking(False)
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | _ONE_THREAD
        arguments = map(str, (there.fileno(), os.getpid(), module, memory, _WORK_SECONDS))
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "vitwire_gateway.worker_process", *arguments,
                stdin=DEVNULL, stdout=DEVNULL, env=environment, pass_fds=[there.fileno()],
                process_group=0,  # Ctrl-C reaches only the parent, which drains first
            )  # fmt: skip
        except OSError as error:
            here.close()
            raise _gone(f"it cannot be started: {error}") from error
        finally:
            there.close()
        worker = cls(process, here)
        try:
            async with asyncio.timeout(_START_SECONDS):
                if unconfined := await worker._answer(0):
                    warn(_log, unconfined)
        except BaseException as error:
            await worker.close()
            if isinstance(error, OSError | TimeoutError):
                raise _gone("it does not start") from error
            raise
        return worker

    async def ask(self, message: bytes, blob: bytes, max_bytes: int) -> Any:  # noqa: ANN401  # as the job returned it
        """Raises ApiError."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_WALL_SECONDS):
                await loop.sock_sendall(self.link, _LENGTH.pack(len(message)) + message)
                await loop.sock_sendall(self.link, blob)
                return await self._answer(max_bytes)
        except (OSError, TimeoutError, ValueError, LookupError, TypeError, RecursionError) as error:
            await self.close()
            raise self._reason() from error

    async def _answer(self, max_bytes: int) -> Any:  # noqa: ANN401  # as above
        """Raises ApiError, OSError for a broken connection, and others for what is no answer."""
        head = bytearray(_LENGTH.size)
        await self._fill(head)
        (length,) = _LENGTH.unpack(head)
        if length > _MAX_HEAD:
            raise ValueError("an answer that is too long")
        content = bytearray(length)
        await self._fill(content)
        blobs: list[bytearray] = []

        def inserted(value: dict[str, Any]) -> object:
            if "error" in value:
                return ApiError(*value["error"])
            if not 0 <= value["bytes"] <= max_bytes - sum(map(len, blobs)):
                raise ValueError("an answer that is too long")
            blobs.append(bytearray(value["bytes"]))
            return blobs[-1]

        answer = json.loads(content, object_hook=inserted)
        for blob in blobs:
            await self._fill(blob)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    async def _fill(self, received: bytearray) -> None:
        with memoryview(received) as view:
            at = 0
            while at < len(view):
                count = await asyncio.get_running_loop().sock_recv_into(self.link, view[at:])
                if not count:
                    raise ConnectionError("the worker has ended")
                at += count

    def _reason(self) -> ApiError:
        number = -(self.process.returncode or 0)
        if number == signal.SIGPROF:
            return ApiError(400, f"reading it takes more than {_WORK_SECONDS:g} s of processor time", "too_costly")
        if number in _FAULTS:
            return ApiError(400, "reading it crashed the process that reads requests", "too_costly")
        return _gone(f"it ended unexpectedly (exit {self.process.returncode})")

    @property
    def is_alive(self) -> bool:
        """True until the process has ended."""
        if self.process.returncode is not None:
            return False
        try:
            return bool(self.link.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def close(self) -> None:
        """Kill the process. Not by `process.kill`, which may reap it, so that asyncio loses its exit status."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        self.link.close()


class Workers:
    """Processes that are started as they are needed. Each caller gets its share of their time.

    module: imports the jobs with all that they use. memory: bytes that each process may use for a job.
    """

    def __init__(self, module: str, memory: int) -> None:
        self._module = module
        self._memory = memory
        self._places = Places(max(_FEWEST, min(_MOST, os.cpu_count() or 1)))
        self._idle: list[_Worker] = []
        self._jobs: set[asyncio.Task[Any]] = set()

    async def run(
        self, caller: Caller, job: Callable[..., object], blob: bytes, max_bytes: int, *arguments: object
    ) -> Any:  # noqa: ANN401  # as the job returns it
        """The result of `job(blob, *arguments)`, with `max_bytes` of bytes at most. Raises ApiError.

        The job may return JSON with bytes and ApiErrors in it: tuples arrive as lists, bytes as bytearrays. A caller
        that is cancelled leaves the job at work, whose time is bounded and counts as its caller's.
        """
        message = pickle.dumps((job, len(blob), arguments))  # the parent is trusted, its worker is not
        place = await self._places.acquire(caller.path)
        task = asyncio.create_task(self._done(place, message, blob, max_bytes))
        self._jobs.add(task)
        task.add_done_callback(self._seen)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End all processes, at once."""
        for task in self._jobs:
            task.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._idle))

    async def _done(self, place: Place, message: bytes, blob: bytes, max_bytes: int) -> object:
        worker = None
        try:
            worker = await self._next()
            place.begin()
            return await worker.ask(message, blob, max_bytes)
        finally:
            if worker and worker.is_alive:
                self._idle.append(worker)
            elif worker:
                await worker.close()
            self._places.give_back(place)

    async def _next(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
            await worker.close()
        return await _Worker.start(self._module, self._memory)

    def _seen(self, task: asyncio.Task[Any]) -> None:
        self._jobs.discard(task)
        if not task.cancelled():
            task.exception()  # after a cancellation nobody awaits it
