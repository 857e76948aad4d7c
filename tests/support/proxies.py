"""A real Envoy in front of replicas."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import yaml

_ENVOY = Path(sys.executable).with_name("envoy")
_EXAMPLE = Path(__file__).parents[2] / "deploy" / "examples" / "envoy" / "envoy.yaml"
Config = dict[str, Any]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in held]


def address(port: int, host: str = "127.0.0.1") -> Config:
    return {"socket_address": {"address": host, "port_value": port}}


def documented(replicas: Sequence[tuple[str, int]], policy: str = "RING_HASH") -> Config:
    """The example of deploy/, with these replicas in place of the Service and another policy, if any."""
    config: Config = yaml.safe_load(_EXAMPLE.read_text(encoding="utf-8"))
    (cluster,) = config["static_resources"]["clusters"]
    endpoints = [{"endpoint": {"address": address(port, host)}} for host, port in replicas]
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    cluster["lb_policy"] = policy
    return config


@dataclass(frozen=True)
class Envoy:
    """A running Envoy."""

    target: str
    admin: int

    def healthy(self) -> int:
        """How many replicas get traffic."""
        try:
            with urlopen(f"http://127.0.0.1:{self.admin}/clusters?format=json", timeout=5) as answer:
                clusters = json.load(answer)["cluster_statuses"]
        except OSError:
            return 0
        hosts = [host for cluster in clusters for host in cluster.get("host_statuses", [])]
        return sum(
            host["health_status"].get("eds_health_status") == "HEALTHY" and len(host["health_status"]) == 1
            for host in hosts
        )

    async def wait_for(self, healthy: int) -> None:
        while await asyncio.to_thread(self.healthy) != healthy:  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.05)


@contextmanager
def envoy(config: Config, folder: Path) -> Iterator[Envoy]:
    """Runs a configuration with one listener, on free ports."""
    front, admin = free_ports(2)
    config["admin"] = {"address": address(admin)}
    config["static_resources"]["listeners"][0]["address"] = address(front)
    file = folder / "envoy.json"
    file.write_text(json.dumps(config))
    words = [str(_ENVOY), "-c", str(file), "--concurrency", "1", "--log-level", "error", "--disable-hot-restart"]
    process = subprocess.Popen(words)
    try:
        yield Envoy(f"127.0.0.1:{front}", admin)
    finally:
        process.terminate()
        process.wait(30)
