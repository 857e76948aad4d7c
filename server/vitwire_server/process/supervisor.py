"""`--devices`: one server process per device, restarted when it dies or hangs. Does not import torch."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Sequence

from vitwire_server.config import host
from vitwire_server.config.settings import ServeSettings
from vitwire_server.observe.logs import configure_logs, plain_line
from vitwire_server.process.children import ChildProcess, Launch, StartFailed
from vitwire_server.process.system import on_signals

_GRACE_SECONDS = 30.0
"""Extra time to drain, beyond the lame duck and drain settings, before processes are killed."""
_LISTENING = re.compile(r"listening on \S+:(\d+), metrics (?:on \S+:(\d+)|off)$")


class DeviceProcess:
    """The server process of one device, on the same ports after each restart."""

    def __init__(
        self, label: str, words: Sequence[str], ports: tuple[int, int], threads: int | None, settings: ServeSettings
    ) -> None:
        """`words` are flags of `serve` without ports; `ports` are those of gRPC and metrics, 0 for a free port.

        `threads` sets OMP_NUM_THREADS unless it is set; None leaves the choice to the process.
        """
        self._words = words
        self._ports = ports
        self._environment = {host.THREADS: os.environ.get(host.THREADS, str(threads))} if threads else {}
        self.child = ChildProcess(
            label,
            self._launch,
            unresponsive_seconds=settings.unresponsive_seconds,
            json_lines=settings.log_format == "json",
            on_stdout=self._on_stdout,
        )

    def _launch(self) -> Launch:
        serve = (sys.executable, "-P", "-m", "vitwire_server", "serve", *self._words)
        return Launch((*serve, "--port", str(self._ports[0]), "--metrics-port", str(self._ports[1])), self._environment)

    def _on_stdout(self, message: str) -> None:
        """Note the ports, to keep them over restarts, and when the process is ready."""
        if found := _LISTENING.match(message):
            self._ports = (int(found[1]), int(found[2] or 0))
        elif message.startswith("ready: "):
            self.child.mark_ready()


async def supervise(words: Sequence[str], settings: ServeSettings) -> int:
    """Serve every device of `--devices` until SIGTERM or SIGINT; returns the exit code.

    `words` are the flags that `settings` came from. The first signal drains all processes, a second kills them.
    """
    configure_logs(settings.log_format, settings.log_level)
    processes = [process.child for process in _processes(words, settings)]
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
    on_cuda = len(settings.device_list) - on_cpu
    threads = host.share_of_cores(on_cpu, on_cuda)
    for index, device in enumerate(settings.device_list):
        label = f"{device}.{index}" if settings.device_list.count(device) > 1 else device
        edges = host.rpc_processes(settings.rpc_process_count, cuda_devices=0 if device == "cpu" else on_cuda)
        flags = [*words, "--rpc-processes", str(edges), "--devices", "none", "--device", device]
        if settings.unix_socket:
            flags += ["--unix-socket", f"{settings.unix_socket}.{index}"]
        ports = (settings.port and settings.port + index, settings.metrics_port and settings.metrics_port + index)
        processes.append(DeviceProcess(label, flags, ports, threads if device == "cpu" else None, settings))
    return processes
