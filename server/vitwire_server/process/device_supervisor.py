"""`--devices`: one server process per device, restarted when it dies or hangs. Does not import torch."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence

from vitwire_children import spawn
from vitwire_server.config import host
from vitwire_server.config.settings import ServeSettings
from vitwire_server.observe.logs import configure_logs, plain_line
from vitwire_server.process.children import ChildProcess, Launch, StartFailed
from vitwire_server.process.system import on_signals

_GRACE_SECONDS = 30.0
"""Extra time to drain, beyond the lame duck and drain settings, before processes are killed."""
_LISTENING = re.compile(r"listening on \S+:(\d+), metrics (?:on \S+:(\d+)|off)$")


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

    def stop(number: signal.Signals = signal.SIGTERM) -> None:
        if not stopping.is_set():
            stopping.set()
            loop.call_later(settings.lame_duck_seconds + settings.drain_seconds + _GRACE_SECONDS, kill)
            for process in processes:
                process.send(signal.SIGINT if number is signal.SIGINT else signal.SIGTERM)

    on_signals(
        lambda number: kill_now() if stopping.is_set() else stop(number), kill_now
    )  # it may be stopping after a failure
    running = [asyncio.create_task(process.keep_running(stopping)) for process in processes]
    try:
        return int(not all(await asyncio.gather(*running)))
    except (StartFailed, OSError) as error:
        stop()
        await asyncio.gather(*running, return_exceptions=True)
        sys.stderr.write(plain_line(f"vitwire-server: {error}", settings.log_format, "error") + "\n")
        return 1


def _processes(words: Sequence[str], settings: ServeSettings) -> list[ChildProcess]:
    processes = []
    on_cpu = settings.device_list.count("cpu")
    on_cuda = len(settings.device_list) - on_cpu
    threads = os.environ.get(host.THREADS, str(host.share_of_cores(on_cpu, on_cuda)))
    for index, device in enumerate(settings.device_list):
        label = f"{device}.{index}" if settings.device_list.count(device) > 1 else device
        edges = host.rpc_processes(settings.rpc_process_count, cuda_devices=0 if device == "cpu" else on_cuda)
        flags = [*words, "--rpc-processes", str(edges), "--devices", "none", "--device", device]
        if settings.unix_socket:
            flags += ["--unix-socket", f"{settings.unix_socket}.{index}"]
        if settings.http_port:
            flags += ["--http-port", str(settings.http_port + index)]
        ports = (settings.port and settings.port + index, settings.metrics_port and settings.metrics_port + index)
        environment = {host.THREADS: threads} if device == "cpu" else {}
        processes.append(_device_process(label, flags, ports, environment, settings))
    return processes


def _device_process(
    label: str, flags: Sequence[str], ports: tuple[int, int], environment: Mapping[str, str], settings: ServeSettings
) -> ChildProcess:
    """The server process of one device, on the same ports of gRPC and metrics after each restart."""

    def launch() -> Launch:
        at = ("--port", str(ports[0]), "--metrics-port", str(ports[1]))
        return Launch(spawn.program("vitwire_server", "serve", *flags, *at), environment)

    def on_stdout(message: str) -> None:
        nonlocal ports
        if found := _LISTENING.match(message):
            ports = (int(found[1]), int(found[2] or 0))
        elif message.startswith("ready: "):
            process.mark_ready()

    process = ChildProcess(label, launch, settings, on_stdout)
    return process
