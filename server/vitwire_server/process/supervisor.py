"""`--devices`: one server process per device, restarted when it dies or hangs. Does not import torch."""

import asyncio
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
"""Seconds before the first restart; doubled for each further failure in a row."""
_STEADY_SECONDS = 60.0
"""Seconds after which a ready process counts as started, which resets the count of failures."""
_GRACE_SECONDS = 30.0
"""Extra time to drain, beyond the lame duck and drain settings, before processes are killed."""
_LINE_BYTES = 1 << 20
_LISTENING = re.compile(r"listening on \S+:(\d+), metrics (?:on \S+:(\d+)|off)$")


class StartFailed(Exception):
    """A process cannot be kept running; the message says which and why."""


class DeviceProcess:
    """The server process of one device, replaced by a new one when it dies."""

    def __init__(
        self, label: str, words: Sequence[str], ports: tuple[int, int], threads: int | None, settings: ServeSettings
    ) -> None:
        """`words` are flags of `serve` without ports; `ports` are those of gRPC and metrics, 0 for a free port.

        `threads` sets OMP_NUM_THREADS; None leaves the choice to the process.
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
        self._last_error = ""

    async def keep_running(self, stopping: asyncio.Event) -> bool:
        """Keep a process running until `stopping`; returns whether it drained. Raises StartFailed or OSError."""
        while not stopping.is_set():
            code = await self._run_once(stopping)
            if stopping.is_set():
                return code in (0, -signal.SIGTERM)  # -SIGTERM: stopped before its handler was set
            delay = self._restart_delay(code)
            _log.error("%s exited unexpectedly (%s); restarting in %g s", self._label, _exit(code), delay)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), delay)
        return True

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if there is one."""
        if self._process:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process, if there is one, and what it started: an orphan would keep its output open."""
        if self._process:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _run_once(self, stopping: asyncio.Event) -> int:
        """Start a process and wait for it to end, and for its output; returns its exit code."""
        self._ready_at = None
        monitor = heartbeat.HeartbeatMonitor()
        try:
            self._process = process = await self._start(monitor)
            watching = asyncio.create_task(self._kill_if_unresponsive(process, monitor))
            if stopping.is_set():
                self.send(signal.SIGTERM)
            assert process.stdout
            assert process.stderr
            await asyncio.gather(
                self._forward(process.stdout, sys.stdout.buffer, self._on_stdout),
                self._forward(process.stderr, sys.stderr.buffer, self._on_stderr),
            )
            code = await process.wait()
            watching.cancel()
            return code
        finally:
            self._process = None  # its number may now be that of another process
            monitor.close()

    async def _start(self, monitor: heartbeat.HeartbeatMonitor) -> Process:
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "vitwire_server", "serve", *self._words),
                *("--port", str(self._ports[0]), "--metrics-port", str(self._ports[1])),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
                limit=_LINE_BYTES,
                env={**self._environment, **os.environ, **heartbeat.variables(monitor)},
                pass_fds=(monitor.write_end,),
                process_group=0,  # so that Ctrl-C reaches only the supervisor, which drains the processes
            )
        finally:
            monitor.child_started()

    async def _kill_if_unresponsive(self, process: Process, monitor: heartbeat.HeartbeatMonitor) -> None:
        fault = await monitor.wait_for_silence(process.pid, self._unresponsive_seconds)
        _log.error("%s %s for %g s; killing it", self._label, fault, self._unresponsive_seconds)
        self.kill()

    async def _forward(self, lines: asyncio.StreamReader, out: BinaryIO, on_line: Callable[[bytes], None]) -> None:
        while True:
            try:
                line = await lines.readline()
            except ValueError:  # longer than the limit: the reader dropped the line
                continue
            if not line:
                return
            line = line.rstrip(b"\r\n")
            on_line(line)
            with suppress(OSError):  # nothing reads our output; keep draining the pipe
                out.write(self._labelled(line))
                out.flush()

    def _labelled(self, line: bytes) -> bytes:
        label = self._label.encode()
        if not self._json_lines:
            return b"[%s] %s\n" % (label, line)
        if not line.startswith(b'{"'):  # written by a library, not by our logging
            line = json.dumps({"message": line.decode(errors="replace")}).encode()
        return b'{"process": "%s", %s\n' % (label, line[1:])

    def _on_stdout(self, line: bytes) -> None:
        """Note the ports, to keep them over restarts, and when the process is ready."""
        message = message_of(line)
        if found := _LISTENING.match(message):
            self._ports = (int(found[1]), int(found[2] or 0))
        elif message.startswith("ready: "):
            self._ready_at = time.monotonic()
            self._was_ever_ready = True

    def _on_stderr(self, line: bytes) -> None:
        self._last_error = message_of(line).removeprefix("vitwire-server: ")

    def _restart_delay(self, code: int) -> float:
        """Seconds until the next start. Raises StartFailed if another start would fail too."""
        if code > 0 and not self._was_ever_ready:  # a wrong flag, checkpoint or port, which it has logged
            raise StartFailed(f"{self._label}: {self._last_error}")
        steady = self._ready_at is not None and time.monotonic() - self._ready_at >= _STEADY_SECONDS
        self._failures = 1 if steady else self._failures + 1
        if self._failures == _FAILURES:
            raise StartFailed(
                f"{self._label}: failed {_FAILURES} starts; last exit: {_exit(code).removeprefix('exit ')}"
            )
        return _FIRST_DELAY * 2.0 ** (self._failures - 1)


async def supervise(words: Sequence[str], settings: ServeSettings) -> int:
    """Serve every device of `--devices` until SIGTERM or SIGINT; returns the exit code.

    `words` are the flags that `settings` came from. The first signal drains all processes, a second kills them.
    """
    configure_logs(settings.log_format, settings.log_level)
    processes = _processes(words, settings)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def kill() -> None:
        for process in processes:
            process.kill()

    def kill_now() -> None:
        sys.stderr.write(plain_line("second signal: killing all processes", settings.log_format, "warning") + "\n")
        kill()

    def stop() -> None:
        if not stopping.is_set():
            stopping.set()
            loop.call_later(settings.lame_duck_seconds + settings.drain_seconds + _GRACE_SECONDS, kill)
            for process in processes:
                process.send(signal.SIGTERM)

    on_signals(lambda: kill_now() if stopping.is_set() else stop(), kill_now)  # it may be stopping after a failure
    running = [asyncio.create_task(process.keep_running(stopping)) for process in processes]
    try:
        return int(not all(await asyncio.gather(*running)))
    except (StartFailed, OSError) as error:
        stop()
        await asyncio.gather(*running, return_exceptions=True)
        sys.stderr.write(plain_line(f"vitwire-server: {error}", settings.log_format, "error") + "\n")
        return 1


def _processes(words: Sequence[str], settings: ServeSettings) -> list[DeviceProcess]:
    processes = []
    on_cpu = settings.device_list.count("cpu")
    threads = host.share_of_cores(on_cpu, len(settings.device_list) - on_cpu)
    for index, device in enumerate(settings.device_list):
        label = f"{device}.{index}" if settings.device_list.count(device) > 1 else device
        flags = [*words, "--devices", "none", "--device", device]
        if settings.unix_socket:
            flags += ["--unix-socket", f"{settings.unix_socket}.{index}"]
        ports = (settings.port and settings.port + index, settings.metrics_port and settings.metrics_port + index)
        processes.append(DeviceProcess(label, flags, ports, threads if device == "cpu" else None, settings))
    return processes


def _exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"code {code}"
