"""The child's side of `jobs`: do jobs on what strangers send, confined. Standard library only."""

import json
import os
import pickle
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from enum import StrEnum
from io import BufferedReader
from typing import Any, NoReturn, TypeAlias

from vitwire_children.confine import May, confined, end_with_parent, ignore_signals


class Fault(StrEnum):
    """Why a job was not done."""

    MALFORMED = "malformed"
    UNSUPPORTED = "unsupported"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    CRASHED = "crashed"
    """It ended the process by a fault of memory access or the like."""
    LOST = "lost"
    """The process was killed, or could not be started: not the job's fault."""


class NotDone(Exception):
    """A job was not done. The text continues a sentence about what a stranger sent."""

    def __init__(self, fault: str, reason: str) -> None:
        super().__init__(fault, reason)
        self.fault = Fault(fault)

    def __str__(self) -> str:
        return str(self.args[1])


LENGTH = struct.Struct("!I")
Answering: TypeAlias = Callable[[Any], tuple[Callable[..., Any], int | None]]
"""Gets the setup; returns what does a job, and the bytes of memory that jobs may use, None for all.

What does a job gets it with its blobs, and returns JSON with bytes and errors in it.
"""


def serve(ahead: Callable[[], Answering], error: type[Exception] = NotDone, may: May = May.COMPUTE) -> NoReturn:
    """Do jobs until the socket is closed, whose descriptor is the first argument of the process.

    `ahead` is called before the setup is awaited. The process is confined before the first job: whatever jobs use must
    have been imported and opened. Jobs may raise errors of this type, which are made again in the parent, by what their
    `__reduce__` returns.
    """
    parent = end_with_parent()
    ignore_signals()
    with socket.socket(fileno=int(sys.argv[1])) as link, link.makefile("rb") as received:
        answering, jobs = ahead(), _jobs(received)
        do, memory = answering(next(jobs)[0])
        warnings.simplefilter("ignore")  # what is read is untrusted: its oddities are not news
        os.dup2(1, 2)  # to /dev/null: what was taken over must not write, or fill, the parent's log
        _send(link, confined(parent, may, memory))
        for job, seconds, blobs in jobs:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # the kernel ends the process after it
            try:
                answer = do(job, *blobs)
            except (error, MemoryError) as raised:
                answer = raised
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(link, answer)
            del answer  # an error holds what the job had
    os._exit(0)


def _jobs(received: BufferedReader) -> Iterator[tuple[Any, float, list[bytes]]]:
    """Jobs with their seconds of processor time and their blobs."""
    while size := received.read(LENGTH.size):
        job, seconds, lengths = pickle.loads(received.read(*LENGTH.unpack(size)))  # noqa: S301 - the parent is trusted
        yield job, seconds, [received.read(length) for length in lengths]


def _send(link: socket.socket, answer: object) -> None:
    """Send an answer as JSON, and the bytes in it after that."""
    blobs: list[bytes] = []

    def outside(value: Exception | bytes) -> dict[str, object]:
        if isinstance(value, Exception):
            return {"error": [] if isinstance(value, MemoryError) else value.__reduce__()[1]}
        blobs.append(value)
        return {"bytes": len(value)}

    content = json.dumps(answer, default=outside).encode()
    link.sendall(LENGTH.pack(len(content)) + content)
    for blob in blobs:
        link.sendall(blob)
