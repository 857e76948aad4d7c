"""Real server processes on free loopback ports, for the demo and the tests."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError
from urllib.request import urlopen

from waiting import until
from zygote import forked

PYTHON = os.environ.get("VITWIRE_PYTHON", sys.executable)
"""The interpreter that has the server; tests of engines run in environments of their own."""
SERVER = ("-m", "vitwire_server")
PIXELS_ONLY = ("--decode-processes", "0")
"""Flags of a server that gets neither files nor pictures: decoders would be half of the work of starting it."""
_READY_SECONDS = 120
_STOP_SECONDS = 60
_SHOWN = 4000
"""Characters of the log that a failed test shows."""
starts = 0
"""Programs that this process started by `spawn`."""


@dataclass(slots=True)
class ServerProcess:
    """A `vitwire-server serve` that this process started."""

    process: subprocess.Popen[bytes]
    output: Path
    port: int = 0
    metrics_port: int = 0

    @property
    def target(self) -> str:
        """Address of its gRPC port."""
        return f"127.0.0.1:{self.port}"

    def log(self) -> str:
        """Its output so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def page(self, path: str) -> tuple[int, str]:
        """Status and body of a page on the metrics port."""
        try:
            with urlopen(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        total = 0.0
        for line in self.page("/metrics")[1].splitlines():
            sample, _, value = line.rpartition(" ")
            if re.match(rf"{name}(\{{|$)", sample) and all(f'{k}="{v}"' in sample for k, v in labels.items()):
                total += float(value)
        return total

    def wait_for(self, pattern: str, seconds: float = _READY_SECONDS) -> re.Match[str]:
        """Wait until its output matches. Raises RuntimeError if it exits or takes too long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.log()):
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"the server did not write {pattern!r} (exit code {self.process.poll()}):\n{self.log()}")

    def stop(self) -> int:
        """Send SIGTERM; returns the exit code."""
        self.process.terminate()
        return self.process.wait(_STOP_SECONDS)


def spawn(
    program: Sequence[str],
    flags: Sequence[str],
    log: IO[bytes],
    wrapper: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a Python program with its output in a file and these additional variables; `wrapper` is a command."""
    global starts  # noqa: PLW0603 - a profile of the suite reads it
    starts += 1
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **(variables or {})}
    if not wrapper and (server := forked(program, flags, environment, stdout=log, stderr=subprocess.STDOUT)):
        return server
    command = [*wrapper, PYTHON, *program, *flags]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def end(process: subprocess.Popen[bytes], seconds: float = _STOP_SECONDS) -> None:
    """Terminate a process if it runs, and kill it if it takes longer than this."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def finished(*words: str | Path, program: Sequence[str] = SERVER) -> subprocess.CompletedProcess[str]:
    """What a program, a server unless another is given, wrote until it ended."""
    arguments, environment = [str(word) for word in words], os.environ | {"HF_HUB_OFFLINE": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process: subprocess.Popen[str] = forked(program, arguments, environment, **pipes) or subprocess.Popen(
        [PYTHON, *program, *arguments], env=environment, **pipes
    )
    with process:
        try:
            output, errors = process.communicate(timeout=_READY_SECONDS)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def shell(script: str, folder: Path) -> str:
    """What lines of a document print, run in `folder` with the tools of this environment."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", script]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


@contextmanager
def serving(
    model: Path,
    *flags: str,
    wait: bool = True,
    program: Sequence[str] = SERVER,
    wrapper: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[ServerProcess]:
    """A ready server of `model` on free ports, stopped at the end of the block, by force if necessary.

    Its budgets are the model's unless flags say otherwise, so that no other server's loads change them.
    """
    defaults = ["--port", "0", "--metrics-port", "0", "--lame-duck-seconds", "0", "--drain-seconds", "10"]
    defaults += ["--budgets", "auto"]
    with tempfile.NamedTemporaryFile(prefix="vitwire-", suffix=".log") as log:
        process = spawn(program, ["serve", "--model", str(model), *defaults, *flags], log.file, wrapper, variables)
        server = ServerProcess(process, Path(log.name))
        try:
            ports = server.wait_for(r'listening on [\d.]+:(\d+), metrics (?:on [\d.]+:(\d+)|off)["\n]')
            server.port, server.metrics_port = int(ports[1]), int(ports[2] or 0)
            if wait:
                server.wait_for(r"ready: ")
            yield server
        except BaseException:
            sys.stderr.write(f"the log of the server ends in:\n{server.log()[-_SHOWN:]}\n")
            raise
        finally:
            end(process)


@contextmanager
def emptied(model: Path, *flags: str, program: Sequence[str] = SERVER) -> Iterator[ServerProcess]:
    """`serving`, where nothing is admitted any more at the end of the block."""
    with serving(model, *flags, program=program) as server:
        yield server
        until(lambda: not server.metric("vitwire_admitted_bytes"), 30)
        assert server.metric("vitwire_admitted_items") == 0


@contextmanager
def supervising(
    model: Path, devices: str, *flags: str, ready: bool = True
) -> Iterator[tuple[ServerProcess, dict[str, ServerProcess]]]:
    """A supervisor of one process per device, and these processes by label, with their ports."""
    names = devices.split(",")
    labels = [f"{name}.{index}" if names.count(name) > 1 else name for index, name in enumerate(names)]
    with serving(model, "--devices", devices, *flags, wait=False) as supervisor:
        children = {}
        for label in labels:
            ports = supervisor.wait_for(rf"\[{label}\] listening on [\d.]+:(\d+), metrics on [\d.]+:(\d+)")
            children[label] = ServerProcess(supervisor.process, supervisor.output, int(ports[1]), int(ports[2]))
        for label in labels if ready else ():
            supervisor.wait_for(rf"\[{label}\] ready: ")
        yield supervisor, children
