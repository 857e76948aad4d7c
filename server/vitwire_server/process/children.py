"""Child processes that are restarted when they die or hang, and their output. Does not import torch."""

import asyncio
import json
import logging
import os
import re
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import BinaryIO

from vitwire_children import heartbeat, spawn
from vitwire_children.restarts import Restarts
from vitwire_server.config.settings import ServeSettings
from vitwire_server.observe.logs import message_of

_log = logging.getLogger(__name__)
_FAILURES = 5
"""Deaths in a row, none of them a minute after the process was ready, until it is not started again."""
_OUTPUT_SECONDS = 1.0
"""Time to read the rest of a dead process's output; an orphan of it may keep the pipes open."""
_LINE_BYTES = 1 << 20
"""Longer lines are dropped."""
_NESTED_TEXT = re.compile(rb"\[(rpc-\d+|http)\] (.*)", re.DOTALL)
_NESTED_JSON = re.compile(rb'\{"process": "(rpc-\d+|http)", (.*)', re.DOTALL)


class StartFailed(Exception):
    """A process cannot be kept running; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a child process: what it inherits, and calls that follow its life."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of this process, which they override."""
    descriptors: Sequence[int] = ()
    """Descriptors that the child inherits under the same numbers."""
    release: Callable[[], None] = lambda: None
    """Closes this process's copies of what only the child needs: it was started or could not be."""
    started: Callable[[int], None] = lambda _: None
    """Called with the child's process id, after `release`."""
    ended: Callable[[], None] = lambda: None
    """Called once, before the next launch: the child has ended, or could not be started."""


def labelled(label: str, line: bytes, *, json_lines: bool) -> bytes:
    """The line with its process: `[cuda:0] …`, or `{"process": "cuda:0", …}`.

    A line that a child of the child wrote has one label for both: `cuda:0/rpc-1`.
    """
    name = label.encode()
    if nested := (_NESTED_JSON if json_lines else _NESTED_TEXT).fullmatch(line):
        name, line = b"%s/%s" % (name, nested[1]), (b"{%s" if json_lines else b"%s") % nested[2]
    if not json_lines:
        return b"[%s] %s" % (name, line)
    if not line.startswith(b'{"'):  # written by a library, not by our logging
        line = json.dumps({"message": line.decode(errors="replace")}).encode()
    return b'{"process": "%s", %s' % (name, line[1:])


@dataclass(slots=True, eq=False)
class ChildProcess:
    """A child process, replaced by a new one when it dies. Used on one event loop."""

    label: str
    launch: Callable[[], Launch]
    """Makes each start."""
    settings: ServeSettings
    """With the format of its lines, and `unresponsive_seconds`, after which it is killed without a heartbeat."""
    on_stdout: Callable[[str], None] = lambda _: None
    """Gets the message of each line that the child prints."""
    is_ready_by_heartbeat: bool = False
    was_ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a process was ready."""
    _process: Process | None = None
    _restarts: Restarts = field(default_factory=Restarts)
    _last_error: str = ""

    @property
    def pid(self) -> int | None:
        """The id of the process; None between two processes."""
        return self._process.pid if self._process else None

    def mark_ready(self) -> None:
        """The process is ready. Until one was, an exit with an error is final."""
        self._restarts.well_since = time.monotonic()
        self.was_ready.set()

    async def keep_running(self, stopping: asyncio.Event) -> bool:
        """Keep a process running until `stopping` is set and it has ended; returns whether it drained.

        Raises StartFailed or OSError if it cannot be kept running. Cancellation kills the process.
        """
        while not stopping.is_set():
            code = await self._run_once(stopping)
            if stopping.is_set():
                return code in (0, -signal.SIGTERM, -signal.SIGINT)  # by a signal: before its handler was set
            delay = self._restart_delay(code)
            _log.error("%s exited unexpectedly (%s); restarting in %g s", self.label, _exit(code), delay)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), delay)
        return True

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if there is one."""
        if self._process:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process, if there is one, and what it started in its process group."""
        if self._process:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _run_once(self, stopping: asyncio.Event) -> int:
        """Start a process and wait for it to end, and for its output; returns its exit code."""
        self._restarts.well_since = None
        launch = self.launch()
        tasks: list[asyncio.Task[None]] = []
        with ExitStack() as stack:
            stack.callback(launch.ended)
            (out, out_end), (err, err_end), (beats, beats_end) = (_pipe(stack) for _ in range(3))
            try:
                self._process = process = await _start(launch, out_end, err_end, beats_end)
                launch.started(process.pid)
                watching = asyncio.create_task(self._kill_if_unresponsive(process, beats))
                outputs = ((out, sys.stdout.buffer, self.on_stdout), (err, sys.stderr.buffer, self._on_stderr))
                forwarding = [asyncio.create_task(self._forward(*each)) for each in outputs]
                tasks = [watching, *forwarding]
                if stopping.is_set():
                    self.send(signal.SIGTERM)
                code = await process.wait()
                watching.cancel()
                _, unread = await asyncio.wait(forwarding, timeout=_OUTPUT_SECONDS)
                if unread:
                    self.kill()  # what it left in its process group
                return code
            finally:
                if self._process and self._process.returncode is None:
                    self.kill()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._process.wait(), _OUTPUT_SECONDS)
                self._process = None  # its number may now be that of another process
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _kill_if_unresponsive(self, process: Process, beats: BinaryIO) -> None:
        first = self.mark_ready if self.is_ready_by_heartbeat else lambda: None
        seconds = self.settings.unresponsive_seconds
        fault = await heartbeat.wait_for_silence(beats, process.pid, seconds, first)
        _log.error("%s %s for %g s; killing it", self.label, fault, seconds)
        self.kill()

    async def _forward(self, pipe: BinaryIO, out: BinaryIO, on_message: Callable[[str], None]) -> None:
        """Forward lines with the label, until every process that inherited the write end has closed it."""
        lines = asyncio.StreamReader(_LINE_BYTES)
        reader = asyncio.StreamReaderProtocol(lines)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: reader, pipe)
        try:
            while True:
                try:
                    line = await lines.readline()
                except ValueError:  # longer than the limit: the reader dropped the line
                    continue
                if not line:
                    return
                line = line.rstrip(b"\r\n")
                on_message(message_of(line))
                with suppress(OSError):  # nothing reads our output; keep draining the pipe
                    out.write(labelled(self.label, line, json_lines=self.settings.log_format == "json") + b"\n")
                    out.flush()
        finally:
            transport.close()

    def _on_stderr(self, message: str) -> None:
        self._last_error = message.removeprefix("vitwire-server: ").removeprefix("vitwire: ")

    def _restart_delay(self, code: int) -> float:
        """Seconds until the next start. Raises StartFailed if another start would fail too."""
        if code > 0 and not self.was_ready.is_set():  # a wrong flag, checkpoint or port, which it has logged
            raise StartFailed(f"{self.label}: {self._last_error}")
        pause = self._restarts.failed()
        if self._restarts.failures == _FAILURES:
            raise StartFailed(
                f"{self.label}: failed {_FAILURES} starts; last exit: {_exit(code).removeprefix('exit ')}"
            )
        return pause


def _pipe(stack: ExitStack) -> tuple[BinaryIO, int]:
    """A pipe: the end to read, which the stack closes, and the one that a child inherits."""
    read_end, write_end = os.pipe()
    return stack.enter_context(os.fdopen(read_end, "rb", buffering=0)), write_end


async def _start(launch: Launch, out_end: int, err_end: int, beats_end: int) -> Process:
    variables = {**os.environ, **launch.environment, heartbeat.VARIABLE: str(beats_end)}
    try:
        options = spawn.options(variables, (beats_end, *launch.descriptors)) | {"stdout": out_end, "stderr": err_end}
        return await asyncio.create_subprocess_exec(*launch.command, **options)
    finally:
        for end in (out_end, err_end, beats_end):
            os.close(end)
        launch.release()


def _exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"code {code}"
