"""`--devices`: one server process per device, each started again when it dies or hangs. Imports no torch."""

import asyncio
import ctypes
import json
import logging
import os
import re
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import BinaryIO

from vitwire_server.config import host
from vitwire_server.config.settings import ServeSettings
from vitwire_server.observe.logs import configure_logs, message_of, plain_line
from vitwire_server.process import heartbeat
from vitwire_server.process.signals import on_signals

_log = logging.getLogger(__name__)
_FAILURES = 5
_FIRST_DELAY = 0.5
"""Seconds before the first restart; each further one in a row waits twice as long."""
_STEADY_SECONDS = 60.0
"""A child that was ready for so long did not fail at its start."""
_GRACE_SECONDS = 30.0
"""What draining may take beyond lame duck and drain before the children are killed."""
_LINE_BYTES = 1 << 20
_LISTENING = re.compile(r"listening on \S+:(\d+), metrics (?:on \S+:(\d+)|off)$")
_PR_SET_PDEATHSIG = 1


class GaveUp(Exception):
    """A child cannot be kept running; the message says which and why."""


class Child:
    """The server of one device: a process, and the next one in its place when it died."""

    def __init__(
        self, label: str, words: Sequence[str], ports: tuple[int, int], threads: int | None, settings: ServeSettings
    ) -> None:
        """`words` are flags of `serve` without ports; `ports` those of gRPC and metrics, 0 for a free one.

        `threads` is its share of the cores, None where the process itself knows.
        """
        self._label = label
        self._words = words
        self._ports = ports
        self._environment = {host.THREADS: str(threads)} if threads else {}
        self._unresponsive_seconds = settings.unresponsive_seconds
        self._json_lines = settings.log_format == "json"
        self._process: Process | None = None
        self._ready_at: float | None = None
        self._was_ever_ready = False
        self._failures = 0
        self._last_words = ""

    async def keep(self, stopping: asyncio.Event) -> bool:
        """Keep a process running until `stopping`; returns whether it drained. Raises GaveUp or OSError."""
        while not stopping.is_set():
            code = await self._live(stopping)
            if stopping.is_set():
                return code in (0, -signal.SIGTERM)  # killed by it before it had a handler: nothing was in flight
            delay = self._delay(code)
            _log.error("%s exited unexpectedly (%s); restarting in %g s", self._label, _exit(code), delay)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), delay)
        return True

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if there is one."""
        if self._process:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _live(self, stopping: asyncio.Event) -> int:
        """One process from start to end; returns its exit code."""
        self._ready_at = None
        pulse = heartbeat.Pulse()
        try:
            self._process = process = await self._start(pulse)
            watching = asyncio.create_task(self._kill_if_unresponsive(process, pulse))
            if stopping.is_set():
                self.send(signal.SIGTERM)
            assert process.stdout
            assert process.stderr
            await asyncio.gather(
                self._pass_on(process.stdout, sys.stdout.buffer, self._note_progress),
                self._pass_on(process.stderr, sys.stderr.buffer, self._note_last_words),
            )
            code = await process.wait()
            watching.cancel()
            return code
        finally:
            pulse.close()

    async def _start(self, pulse: heartbeat.Pulse) -> Process:
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "vitwire_server", "serve", *self._words),
                *("--port", str(self._ports[0]), "--metrics-port", str(self._ports[1])),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
                limit=_LINE_BYTES,
                env={**self._environment, **os.environ, heartbeat.VARIABLE: str(pulse.write_end)},
                pass_fds=(pulse.write_end,),
                process_group=0,  # Ctrl-C reaches the supervisor alone: a second signal would end a drain
                preexec_fn=_dying_with(os.getpid()),
            )
        finally:
            pulse.started()

    async def _kill_if_unresponsive(self, process: Process, pulse: heartbeat.Pulse) -> None:
        fault = await pulse.silence(process.pid, self._unresponsive_seconds)
        _log.error("%s %s for %g s; killing it", self._label, fault, self._unresponsive_seconds)
        with suppress(ProcessLookupError):
            process.kill()

    async def _pass_on(self, lines: asyncio.StreamReader, out: BinaryIO, note: Callable[[bytes], None]) -> None:
        while True:
            try:
                line = await lines.readline()
            except ValueError:  # longer than the reader's limit, which dropped it
                continue
            if not line:
                return
            line = line.rstrip(b"\r\n")
            note(line)
            with suppress(OSError):  # nobody reads; the child must not wait for it
                out.write(self._labelled(line))
                out.flush()

    def _labelled(self, line: bytes) -> bytes:
        label = self._label.encode()
        if not self._json_lines:
            return b"[%s] %s\n" % (label, line)
        if not line.startswith(b'{"'):  # of a library that knows nothing of the log's format
            line = json.dumps({"message": line.decode(errors="replace")}).encode()
        return b'{"process": "%s", %s\n' % (label, line[1:])

    def _note_progress(self, line: bytes) -> None:
        """Free ports stay the same over restarts, for clients that know them."""
        message = message_of(line)
        if found := _LISTENING.match(message):
            self._ports = (int(found[1]), int(found[2] or 0))
        elif message.startswith("ready: "):
            self._ready_at = time.monotonic()
            self._was_ever_ready = True

    def _note_last_words(self, line: bytes) -> None:
        self._last_words = message_of(line).removeprefix("vitwire-server: ")

    def _delay(self, code: int) -> float:
        """Seconds until the next start. Raises GaveUp if that would be no use."""
        if code > 0 and not self._was_ever_ready:  # flags, checkpoint or port: it said which and would again
            raise GaveUp(f"{self._label}: {self._last_words}")
        steady = self._ready_at is not None and time.monotonic() - self._ready_at >= _STEADY_SECONDS
        self._failures = 1 if steady else self._failures + 1
        if self._failures == _FAILURES:
            raise GaveUp(f"{self._label}: failed {_FAILURES} starts; last exit: {_exit(code)}")
        return _FIRST_DELAY * 2.0 ** (self._failures - 1)


async def supervise(words: Sequence[str], settings: ServeSettings) -> int:
    """Serve every device of `--devices` until SIGTERM or SIGINT; returns the exit code.

    `words` are the flags that `settings` came from. The first signal lets the children drain, a second
    one kills them.
    """
    configure_logs(settings.log_format, settings.log_level)
    children = _children(words, settings)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def kill() -> None:
        for child in children:
            child.send(signal.SIGKILL)

    def insist() -> None:
        sys.stderr.write(plain_line("second signal: killing all processes", settings.log_format, "warning") + "\n")
        kill()

    def stop() -> None:
        if not stopping.is_set():
            stopping.set()
            loop.call_later(settings.lame_duck_seconds + settings.drain_seconds + _GRACE_SECONDS, kill)
            for child in children:
                child.send(signal.SIGTERM)

    on_signals(lambda: insist() if stopping.is_set() else stop(), insist)  # it may be stopping by itself
    keeping = [asyncio.create_task(child.keep(stopping)) for child in children]
    try:
        return int(not all(await asyncio.gather(*keeping)))
    except (GaveUp, OSError) as error:
        stop()
        await asyncio.gather(*keeping, return_exceptions=True)
        sys.stderr.write(plain_line(f"vitwire-server: {error}", settings.log_format, "error") + "\n")
        return 1


def _children(words: Sequence[str], settings: ServeSettings) -> list[Child]:
    children = []
    on_cpu = settings.device_list.count("cpu")
    threads = host.share_of_cores(on_cpu, len(settings.device_list) - on_cpu)
    for index, device in enumerate(settings.device_list):
        label = f"{device}.{index}" if settings.device_list.count(device) > 1 else device
        flags = [*words, "--devices", "none", "--device", device]
        if settings.unix_socket:
            flags += ["--unix-socket", f"{settings.unix_socket}.{index}"]
        ports = (settings.port and settings.port + index, settings.metrics_port and settings.metrics_port + index)
        children.append(Child(label, flags, ports, threads if device == "cpu" else None, settings))
    return children


def _dying_with(supervisor: int) -> Callable[[], None] | None:
    """What a forked child runs before exec: the kernel kills it when the supervisor is gone. Linux only."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != supervisor:  # gone before the kernel was told
            os._exit(1)

    return prepare


def _exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
