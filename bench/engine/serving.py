"""`vllm serve` as processes, and what every setup gives it. Nothing of vLLM is imported here."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Self
from urllib.error import URLError
from urllib.request import urlopen

from bench.engine.photos import MODEL

from servers import ServerProcess, end

Row = dict[str, Any]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
"""Defaults for every vLLM of a benchmark."""
SERVE = f"{sys.executable} -m vllm.entrypoints.cli.main serve"
_FLAGS = {
    "--served-model-name": MODEL,
    "--host": "127.0.0.1",
    "--dtype": "bfloat16",
    "--max-model-len": "8192",
    "--limit-mm-per-prompt": '{"image": 4, "video": 0}',
    "--seed": "0",
}
_SWITCHES = ("--skip-mm-profiling", "--disable-uvicorn-access-log")
_FIRST_PORT, _LAST_PORT = 20000, 32000
"""Below those that Linux gives to outgoing connections."""
SHOWN = 6000
"""Characters of the log that an error shows."""


class Failed(RuntimeError):
    """A process of a setup did not start, or ended."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an engine is started with beyond the settings of all: flags (a switch's value is empty) and variables."""

    flags: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """As `row` returns it. Raises ValueError for anything else."""
        parts = row.get("flags"), row.get("environment")
        if not all(isinstance(part, dict) and all(isinstance(each, str) for each in part.values()) for part in parts):
            raise ValueError("settings of an engine are flags and environment, each an object with texts")
        return cls(*parts)  # type: ignore[arg-type]  # checked above

    def row(self) -> Row:
        return {"flags": dict(self.flags), "environment": dict(self.environment)}

    def changed(self, other: "Settings") -> "Settings":
        """With the other's on top."""
        return Settings({**self.flags, **other.flags}, {**self.environment, **other.environment})

    def __str__(self) -> str:
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*variables, *(f"{name} {value}" for name, value in self.flags.items())]) or "defaults"


@dataclass(slots=True)
class EngineProcess(ServerProcess):
    """A `vllm serve` that this process started."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def failure(self) -> str:
        """Why it cannot go on; empty while it runs."""
        code = self.process.poll()
        return "" if code is None else f"the engine ended with {code}; its log ends in:\n{self.log()[-SHOWN:]}"

    def wait(self, deadline: float) -> None:
        """Until it answers. Raises Failed."""
        while time.monotonic() < deadline:
            if failure := self.failure():
                raise Failed(failure)
            try:
                with urlopen(f"{self.url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (URLError, OSError):
                time.sleep(0.2)
        raise Failed(f"the engine was not ready in time; its log ends in:\n{self.log()[-SHOWN:]}")

    def kv_tokens(self) -> int | None:
        """Tokens that its KV blocks hold."""
        page = self.page("/metrics")[1]
        found = [
            re.search(rf'vllm:cache_config_info{{.*{name}="(\d+)"', page) for name in ("num_gpu_blocks", "block_size")
        ]
        return int(found[0][1]) * int(found[1][1]) if found[0] and found[1] else None

    def counters(self) -> dict[str, float]:
        """Sums of vLLM's counters and histograms: where time went, what the connector did; none of a dead engine."""
        found: dict[str, float] = {}
        try:
            page = self.page("/metrics")[1]
        except OSError:
            return {}
        for line in page.splitlines():
            if named := re.match(
                r"(?:vllm:)?(vitwire_\w+_(?:total|sum|count)|request_(?:queue|prefill)_time_seconds_(?:sum|count))",
                line,
            ):
                found[named[1]] = found.get(named[1], 0.0) + float(line.rpartition(" ")[2])
        return found


@contextmanager
def engine(command: str, model: Path, settings: Settings, device: int | None) -> Iterator[EngineProcess]:
    """A `vllm serve` that is starting; ended with the block, and all that it started.

    command: its words; flags follow, unless `{port}` is among them. device: one of those visible here.
    """
    port = free_port()
    words = command.replace("{port}", str(port)).split()
    if "{port}" not in command:
        flags = {**_FLAGS, "--port": str(port), **settings.flags}
        words += [str(model), *_SWITCHES, *(word for each in flags.items() for word in each if word)]
    variables = {**ENVIRONMENT, **os.environ, **settings.environment}
    if device is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[device] if visible else str(device)
    with NamedTemporaryFile(prefix="engine-", suffix=".log") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True)
        found = EngineProcess(process, Path(log.name))
        found.port = found.metrics_port = port
        try:
            yield found
        finally:
            end(process, 15)
            _end_group(process.pid)


def _end_group(group: int) -> None:
    """End what a process that led a group has left, such as an engine's core, and wait until its memory is free."""
    deadline = time.monotonic() + 10
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.1)


def transfer(target: str, delivery: str, keys: Mapping[str, object]) -> dict[str, str]:
    """The flag of an engine that fetches from `target`, through the connector that notes moments."""
    extra = {"target": target, "wait": 10, "delivery": delivery, "delivery_bytes": DELIVERY_BYTES, **keys}
    chosen = {"ec_connector": "Watched", "ec_connector_module_path": "bench.engine.watched", "ec_role": "ec_consumer"}
    return {"--ec-transfer-config": json.dumps(chosen | {"ec_connector_extra_config": extra})}


DELIVERY_BYTES = 1 << 30
"""The pool of an engine's connector for NIXL; 32 embeddings of 1024² for the 8B."""


def free_port() -> int:
    """Raises RuntimeError if there is none."""
    for port in range(_FIRST_PORT + os.getpid() % 1000 * 8, _LAST_PORT):
        if port not in _given:
            with socket.socket() as tried:
                try:
                    tried.bind(("127.0.0.1", port))
                except OSError:
                    continue
            _given.add(port)
            return port
    raise RuntimeError("no port is free")


_given: set[int] = set()
"""Ports that processes of this run have or had."""
