"""Metadata of unknown agents is loaded by a child process first.

NIXL ends the process on some metadata: that of another version of UCX is enough. Run as a program, this is the child.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from queue import SimpleQueue
from select import select
from threading import Thread
from typing import IO

from vitwire.agents import Agent, AgentError

_log = logging.getLogger(__name__)
_SECONDS = 10.0
"""Most that a child may take for one agent, its start included."""
_PAUSES = (0.0, 0.1, 0.5)
"""Seconds before each attempt to start a child."""
_LENGTH_BYTES = 4
_ACCEPTED, _REFUSED = b"+", b"-"


class Vetter:
    """Asks a child process whether metadata can be loaded, in a thread of its own; a child that ends is replaced."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._asked: SimpleQueue[tuple[bytes, Callable[[bool], None]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="vetting", daemon=True)
        self._thread.start()

    def ask(self, metadata: bytes, answer: Callable[[bool], None]) -> None:
        """Call `answer` in the vetting thread with whether an agent can be added by its metadata."""
        self._asked.put((metadata, answer))

    def close(self) -> None:
        """End the thread and its child."""
        self._asked.put(None)
        self._thread.join(_SECONDS)

    def _run(self) -> None:
        self._try_start()  # importing NIXL takes half a second, which the first consumer need not wait for
        while asked := self._asked.get():
            metadata, answer = asked
            answer(self._verdict(metadata))
        self._end_child()

    def _verdict(self, metadata: bytes) -> bool:
        try:
            return self._try_start() and self._is_accepted(metadata)
        except Exception:  # noqa: BLE001 - the thread's loop: deliveries wait for every answer
            _log.exception("a NIXL agent cannot be vetted and is refused")
            return False

    def _try_start(self) -> bool:
        """Whether a child runs now; tried again, as the system may be short of processes for a moment."""
        for pause in _PAUSES:
            time.sleep(pause)
            try:
                self._start()
            except (OSError, subprocess.SubprocessError) as error:
                _log.warning("the process that vets NIXL agents cannot be started: %s", error)
            else:
                return True
        return False

    def _is_accepted(self, metadata: bytes) -> bool:
        child = self._child
        assert child, "it was started"
        assert child.stdin, "a pipe"
        assert child.stdout, "a pipe"
        try:
            child.stdin.write(len(metadata).to_bytes(_LENGTH_BYTES, "little") + metadata)
            child.stdin.flush()
            readable, _, _ = select([child.stdout], [], [], _SECONDS)
            verdict = child.stdout.read(1) if readable else b""
        except OSError:
            verdict = b""
        if verdict not in (_ACCEPTED, _REFUSED):
            _log.warning("the metadata of a NIXL agent ended the process that vets them; the agent is refused")
            self._end_child()
            self._try_start()
        return verdict == _ACCEPTED

    def _start(self) -> None:
        if self._child is None or self._child.poll() is not None:
            command = [sys.executable, "-m", "vitwire_server.delivery.vetting"]
            self._child = subprocess.Popen(  # noqa: S603 - this module
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the server, at whose end the pipe closes
            )

    def _end_child(self) -> None:
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe:
                pipe.close()
        self._child = None


def main(asked: IO[bytes], answers: IO[bytes]) -> None:
    """Answer one byte for each metadata, until the parent's end of the pipe is closed."""
    agent = Agent("vetting")
    while len(head := asked.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
        metadata = asked.read(int.from_bytes(head, "little"))
        try:
            agent.remove(agent.add(metadata))
            answers.write(_ACCEPTED)
        except AgentError:
            answers.write(_REFUSED)
        answers.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as verdicts:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # UCX writes warnings to stdout
        main(sys.stdin.buffer, verdicts)
