"""`vitwire router` and what stands around it, as real processes on free ports."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from servers import ServerProcess

_VITWIRE = Path(sys.executable).with_name("vitwire")
_STOP_SECONDS = 30


class EngineProcess(ServerProcess):
    """The stand-in engine."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def requests(self) -> list[dict[str, Any]]:
        """What it received since the last call."""
        found: list[dict[str, Any]] = self.test("requests")
        return found

    def test(self, what: str) -> Any:  # JSON
        with urlopen(Request(f"{self.url}/test/{what}", method="POST"), timeout=10) as answer:
            return json.loads(answer.read())


class RouterProcess(ServerProcess):
    """A `vitwire router`."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def engine(port: int = 0) -> Iterator[EngineProcess]:
    """A stand-in engine."""
    program = Path(__file__).with_name("engine.py")
    with _process([str(program), str(port)]) as (process, log):
        found = EngineProcess(process, log)
        found.port = int(found.wait_for(r"running on http://[\d.]+:(\d+)")[1])
        yield found


@contextmanager
def router(
    target: str, engine_url: str, *flags: str, environment: dict[str, str] | None = None
) -> Iterator[RouterProcess]:
    """A router in front of an encoder and an engine."""
    command = [str(_VITWIRE), "router", "--port", "0", "--target", target, "--engine-url", engine_url, *flags]
    with _process(command, environment) as (process, log):
        found = RouterProcess(process, log)
        found.port = found.metrics_port = int(found.wait_for(r"listening on [\d.]+:(\d+)")[1])
        yield found


@contextmanager
def _process(
    arguments: Sequence[str], environment: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    variables = os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {})
    with tempfile.NamedTemporaryFile(prefix="vitwire-", suffix=".log") as log:
        process = subprocess.Popen([sys.executable, *arguments], stdout=log, stderr=subprocess.STDOUT, env=variables)
        try:
            yield process, Path(log.name)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
