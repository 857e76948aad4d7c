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

ENVOY = Path(sys.executable).with_name("envoy")
EXAMPLE = Path(__file__).parents[2] / "deploy" / "examples" / "envoy" / "envoy.yaml"
Config = dict[str, Any]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in held]


def address(port: int, host: str = "127.0.0.1") -> Config:
    return {"socket_address": {"address": host, "port_value": port}}


def documented(replicas: Sequence[tuple[str, int]], policy: str = "RING_HASH", interval: str = "1s") -> Config:
    """The example of deploy/ with these replicas in place of the Service; another policy for the hint, if any."""
    config: Config = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    least_request, by_content = config["static_resources"]["clusters"]
    by_content["lb_policy"] = policy
    endpoints = [{"endpoint": {"address": address(port, host)}} for host, port in replicas]
    for cluster in (least_request, by_content):
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
        for check in cluster["health_checks"]:
            check |= {"interval": interval, "no_traffic_interval": interval}
    return config


@dataclass(frozen=True)
class Envoy:
    """A running Envoy."""

    target: str
    admin: int

    def healthy(self) -> int:
        """How many replicas get requests, in the cluster that has fewer of them."""
        try:
            with urlopen(f"http://127.0.0.1:{self.admin}/clusters?format=json", timeout=5) as answer:
                clusters = json.load(answer)["cluster_statuses"]
        except OSError:
            return 0
        return min(sum(map(_is_used, cluster.get("host_statuses", []))) for cluster in clusters)

    async def wait_for(self, healthy: int) -> None:
        while await asyncio.to_thread(self.healthy) != healthy:  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.05)


def _is_used(host: Config) -> bool:
    """Found by its name's resolution, and not marked by any check."""
    status = host["health_status"]
    return status.get("eds_health_status") == "HEALTHY" and len(status) == 1


@contextmanager
def envoy(config: Config, folder: Path) -> Iterator[Envoy]:
    """Runs a configuration with one listener, on free ports."""
    front, admin = free_ports(2)
    config["admin"] = {"address": address(admin)}
    config["static_resources"]["listeners"][0]["address"] = address(front)
    file = folder / "envoy.json"
    file.write_text(json.dumps(config))
    words = [str(ENVOY), "-c", str(file), "--concurrency", "1", "--log-level", "error", "--disable-hot-restart"]
    process = subprocess.Popen(words)
    try:
        yield Envoy(f"127.0.0.1:{front}", admin)
    finally:
        process.terminate()
        process.wait(30)
