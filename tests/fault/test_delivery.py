"""Delivery through NIXL to clients that die, lie, fall silent, or come and go."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from checkpoints import Checkpoints
from faults import FAULTY, Note, rss_mib, scaled, settle
from servers import ServerProcess, serving
from vitwire import Client, Item
from vitwire.shared.agents import is_installed

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")
COLUMNS = 3 * 2 * 14 * 14
LOAD = """
import sys, numpy as np
from vitwire import Client, Item
target, delivery = sys.argv[1:]
items = [Item(np.full((64, 3 * 2 * 14 * 14), i, np.float32), (1, 8, 8)) for i in range(8)]
with Client(target, delivery=delivery, delivery_bytes=1 << 20, timeout=60) as client:
    while True:
        client.encode(items)
        print("encoded", flush=True)
"""


@pytest.fixture(scope="module", params=["1", "2"])
def server(request: pytest.FixtureRequest, checkpoints: Checkpoints, fault: Path) -> Iterator[ServerProcess]:
    """In both shapes."""
    flags = ("--graphs", "off", "--canary-seconds", "1", "--nixl", "--nixl-seconds", "2")
    program = (FAULTY, str(fault)) if request.param == "1" else ("-m", "vitwire_server")
    with serving(checkpoints("qwen2_vl"), *flags, "--rpc-processes", request.param, program=program) as process:
        yield process


def items(count: int) -> list[Item]:
    return [Item(np.full((64, COLUMNS), i, np.float32), (1, 8, 8)) for i in range(count)]


def client_process(server: ServerProcess, delivery: str = "nixl") -> "subprocess.Popen[str]":
    """A client under way."""
    process = subprocess.Popen(
        [sys.executable, "-c", LOAD, server.target, delivery], stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    )
    assert process.stdout
    assert process.stdout.readline() == "encoded\n"
    return process


def kill(process: "subprocess.Popen[str]") -> None:
    with process:
        process.kill()


def check_delivery(server: ServerProcess) -> None:
    """Others are served as ever, with the rows that they should get."""
    with Client(server.target, delivery="stream") as plain, Client(server.target, delivery="nixl") as client:
        for expected, got in zip(plain.encode(items(3)), client.encode(items(3)), strict=True):
            np.testing.assert_array_equal(got.numpy(), expected.numpy())


def eventually(what: str, value: float, server: ServerProcess, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while server.metric(what) > value:
        assert time.monotonic() < deadline, f"{what} is {server.metric(what)}, {server.log()[-2000:]}"
        time.sleep(0.1)


def test_clients_that_are_killed(server: ServerProcess, note: Note) -> None:
    count = scaled(40, least=2)
    for _ in range(count):
        process = client_process(server)
        time.sleep(np.random.default_rng().random() * 0.05)
        kill(process)
    settle(server)
    check_delivery(server)
    note(killed=count, failed=server.metric("vitwire_delivery_fallbacks_total", reason="failed"))


def test_clients_that_fall_silent(server: ServerProcess, note: Note) -> None:
    """A stopped client costs its own items the time limit, and others nothing."""
    count = scaled(20, least=2)
    silent = [client_process(server) for _ in range(count)]
    try:
        for process in silent:
            process.send_signal(signal.SIGSTOP)
        slowest = 0.0
        for _ in range(10):
            start = time.monotonic()
            check_delivery(server)
            slowest = max(slowest, time.monotonic() - start)
    finally:
        for process in silent:
            kill(process)
    settle(server, seconds=90)
    note(silent=count, slowest_seconds=slowest)


def test_clients_come_and_go(server: ServerProcess, note: Note) -> None:
    count = scaled(1000, least=30)
    used = []
    for number in range(count):
        with Client(server.target, delivery="nixl", delivery_bytes=1 << 20, timeout=120) as client:
            client.encode(items(1))
        if number in (count // 3, count - 1):
            used.append((rss_mib(server), len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))))
    settle(server)
    (memory, files), (memory_after, files_after) = used
    note(clients=count, mib=(memory, memory_after), descriptors=(files, files_after))
    assert memory_after - memory < 64 + 2 * 50, "and two senders more, most of whose memory is shared"
    assert files_after - files < 3 * count  # until agents that are not used are disconnected
