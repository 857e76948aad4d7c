"""Processes that answer commands, both as lines of JSON: their parent's side and their own. Standard library only."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from select import select
from typing import Any, Self

Row = dict[str, Any]
ANSWER_SECONDS = 180


class ClientFailed(Exception):
    """A process could not do what it was asked."""


class ClientEnded(ClientFailed):
    """It exited, or did not answer in time."""


class CommandProcess:
    """A process that runs `answer_commands`. It shares the stderr of this process."""

    def __init__(self, *words: str, environment: Mapping[str, str] = os.environ) -> None:
        """words: the command."""
        variables = {"GRPC_VERBOSITY": "NONE", "OMP_WAIT_POLICY": "PASSIVE", **environment}
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, seconds: float = ANSWER_SECONDS, /, **command: Any) -> Row:
        """Send a command and wait for its answer."""
        self.send(**command)
        return self.answer(seconds)

    def send(self, **command: Any) -> None:
        assert self._process.stdin
        try:
            print(json.dumps(command), file=self._process.stdin, flush=True)
        except OSError as error:
            raise ClientEnded(f"the client process has exited: {error}") from error

    def answer(self, seconds: float = ANSWER_SECONDS) -> Row:
        """The answer to the oldest command without one. Raises ClientFailed, or ClientEnded if none comes in time."""
        assert self._process.stdout
        if not select([self._process.stdout], [], [], max(0.0, seconds))[0]:
            raise ClientEnded(f"the client process did not answer for {seconds:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise ClientEnded(f"the client process exited with {self._process.wait()}")
        answer: Row = json.loads(line)
        if "failed" in answer:
            raise ClientFailed(answer["failed"])
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end(self._process)


def end(process: subprocess.Popen[str]) -> None:
    """End a process, and close its pipes."""
    process.kill()
    process.communicate()


def answer_commands(answered: Callable[[Row], Row]) -> None:
    """Until stdin is closed; one that fails is answered by `failed` with the reason. Other output goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        try:
            answer = answered(json.loads(line))
        except Exception as error:  # noqa: BLE001 - the parent process reports it
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
