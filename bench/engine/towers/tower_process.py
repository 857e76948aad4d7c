"""Processes that each have a tower: vLLM's and the server's packages need not fit into one environment."""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from select import select
from types import TracebackType
from typing import IO, Any, Self

Row = dict[str, Any]
_SHOWN = 3000
"""Characters of its log that a failure shows."""
_STOP_SECONDS = 20


class TowerFailed(Exception):
    """A tower could not do what it was asked; its process continues."""


class TowerEnded(Exception):
    """It exited, or did not answer in time."""


def checked(name: str, answer: Row) -> Row:
    """The answer of a tower. Raises TowerFailed if it says so."""
    if "failed" in answer:
        raise TowerFailed(f"{name}: {answer['failed']}")
    return answer


class TowerProcess:
    """A process that answers commands, both as lines of JSON; its log is a file."""

    def __init__(self, name: str, command: Sequence[str], job: Row, environment: Mapping[str, str]) -> None:
        self.name = name
        self._log: IO[bytes] = tempfile.TemporaryFile(prefix=f"{name}-")  # noqa: SIM115  # closed with this
        self._process = subprocess.Popen(
            [*command, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            bufsize=0,
        )
        self._read = b""

    def ask(self, command: Row, seconds: float) -> Row:
        """Send a command and wait for its answer. Raises TowerFailed, or TowerEnded if no other answer will come."""
        assert self._process.stdin
        with suppress(OSError):  # it has exited, as `answer` says
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
        return self.answer(seconds)

    def answer(self, seconds: float) -> Row:
        """The next answer; the first one comes when the tower is loaded. Raises as `ask` does."""
        pipe = self._process.stdout
        assert pipe
        while b"\n" not in self._read:
            if not select([pipe], [], [], max(0.0, seconds))[0]:
                raise self._failure(f"did not answer for {seconds:.0f} s")
            if not (part := pipe.read(1 << 16)):
                raise self._failure(f"exited with {self._process.wait()}")
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return checked(self.name, json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """It ends when it reads the end of its commands."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with suppress(OSError):
                pipe.close()
        if kind:
            self._process.kill()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _failure(self, what: str) -> TowerEnded:
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")[-_SHOWN:]
        return TowerEnded(f"{self.name} {what}; its log ends in:\n{log}")
