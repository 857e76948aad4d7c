"""`--devices`: one process per device under one supervisor."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

import httpx2
import numpy as np
import psutil
import pytest

from checkpoints import Checkpoints
from manifests import documents_of, server
from servers import PIXELS_ONLY, SERVER, ServerProcess, finished, serving, spawn, supervising
from vitwire import AsyncClient, Client, DeadlineExceeded, Item, Unavailable, VitwireError
from vitwire_server.config.host import THREADS, share_of_cores
from waiting import until

LABELS = ("cpu.0", "cpu.1")
EXPECTED = {"OK", "UNAVAILABLE", "DEADLINE_EXCEEDED"}
"""Outcomes of calls while servers come and go."""
ITEMS = [Item(np.ones((16, 3 * 2 * 14 * 14), np.float32), (1, 4, 4))] * 8


@contextmanager
def supervised(model: Path, *flags: str, ready: bool = True) -> Iterator[tuple[ServerProcess, list[ServerProcess]]]:
    """A supervisor of two CPU processes, and each of them with its ports."""
    with supervising(model, "cpu,cpu", *PIXELS_ONLY, *flags, ready=ready) as (supervisor, children):
        assert tuple(children) == LABELS
        yield supervisor, list(children.values())


def encoded(children: list[ServerProcess]) -> list[float]:
    return [child.metric("vitwire_items_total") for child in children]


def encode_until_shared(client: Client, children: list[ServerProcess]) -> None:
    """The client connects to each address in its own time."""
    before, deadline = encoded(children), time.monotonic() + 60
    while any(now <= then for now, then in zip(encoded(children), before, strict=True)):
        assert time.monotonic() < deadline
        assert len(client.encode(ITEMS, timeout=60)) == len(ITEMS)


def probed(children: list[ServerProcess]) -> dict[str, bool]:
    """The outcomes of the probes of overlays/multi-gpu, run as a kubelet does, on the ports of these processes."""
    container = server(documents_of("overlays/multi-gpu"))
    running = {}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        program, *words = (word for word in container[name]["exec"]["command"] if not word.isdecimal())
        assert program == "python3"
        ports = [str(child.metrics_port) for child in children]
        running[name.removesuffix("Probe")] = subprocess.Popen([sys.executable, *words, *ports])
    return {name: probe.wait(60) == 0 for name, probe in running.items()}


def check_probes(supervisor: ServerProcess, children: list[ServerProcess]) -> None:
    """All devices must start, one is enough to be ready, and one that hangs restarts the container.

    A process that is not suspended may still answer too late on a busy machine, so a probe may fail and is repeated.
    """
    processes = psutil.Process(supervisor.process.pid).children()
    try:
        _until_probed(children, startup=True, readiness=True, liveness=True)
        processes[0].suspend()
        _until_probed(children, startup=False, readiness=True, liveness=False)
        processes[1].suspend()
        assert not any(probed(children).values())
    finally:
        for process in processes:
            process.resume()


def _until_probed(children: list[ServerProcess], **outcomes: bool) -> None:
    deadline = time.monotonic() + 30
    while (found := probed(children)) != outcomes:
        assert time.monotonic() < deadline, found


def test_two_processes_share_requests_and_a_dead_one_returns(checkpoints: Checkpoints) -> None:
    with supervised(checkpoints("qwen2_vl")) as (supervisor, children):
        check_probes(supervisor, children)
        target = ",".join(child.target for child in children)
        with Client(f"ipv4:{target}", spread=2, timeout=60) as client:
            encode_until_shared(client, children)
            before = encoded(children)
            client.encode(ITEMS)
            assert encoded(children) == [count + len(ITEMS) / 2 for count in before]

            processes = psutil.Process(supervisor.process.pid).children()
            assert len(processes) == 2
            if sys.platform == "linux":
                assert "torch" not in Path(f"/proc/{supervisor.process.pid}/maps").read_text()
                assert "torch" in Path(f"/proc/{processes[0].pid}/maps").read_text()
            processes[0].kill()
            label = supervisor.wait_for(r"(cpu\.\d) exited unexpectedly \(SIGKILL\); restarting in 0\.5 s")[1]
            client.encode(ITEMS)
            supervisor.wait_for(rf"(?s)(\[{label}\] ready: .*){{2}}")
            restarted = children[LABELS.index(label)]
            assert restarted.metric("vitwire_items_total") == 0, "a new process on the old ports"
            encode_until_shared(client, children)

        processes = psutil.Process(supervisor.process.pid).children()
        assert supervisor.stop() == 0
        assert not any(process.is_running() for process in processes)
        assert all(re.search(rf"\[{re.escape(label)}\] .*draining", supervisor.log()) for label in LABELS)


@pytest.mark.matrix
def test_calls_end_when_all_servers_are_gone_and_succeed_when_they_are_back(checkpoints: Checkpoints) -> None:
    timeout, back = 4.0, Event()

    def work(client: Client) -> tuple[float, set[str]]:
        """The longest call, in seconds, and what came of the calls."""
        longest, told = 0.0, set()
        while not back.is_set():
            began = time.monotonic()
            try:
                client.encode(ITEMS[:1])
                told.add("OK")
            except VitwireError as error:
                told.add(error.code if error.code in EXPECTED else repr(error))
            longest = max(longest, time.monotonic() - began)
        return longest, told

    with (
        supervised(checkpoints("qwen2_vl")) as (supervisor, children),
        ThreadPoolExecutor(4) as pool,
        Client(f"ipv4:{','.join(child.target for child in children)}", timeout=timeout) as client,
    ):
        encode_until_shared(client, children)
        workers = [pool.submit(work, client) for _ in range(4)]
        try:
            for process in psutil.Process(supervisor.process.pid).children():
                time.sleep(0.3)
                process.kill()
            for label in LABELS:
                supervisor.wait_for(rf"(?s)(\[{label}\] ready: .*){{2}}")
            encode_until_shared(client, children)
        finally:
            back.set()
        for worker in workers:
            longest, told = worker.result(timeout + 20)
            assert longest < timeout + 2
            assert told <= EXPECTED
            assert "UNAVAILABLE" in told, "nobody was left to answer"


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are opened by /proc")
def test_a_stopped_process_is_replaced_and_every_line_is_json(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes have their share of the cores; the one that is stopped is noticed by its heartbeat."""
    monkeypatch.delenv(THREADS, raising=False)
    flags = ["--devices", "cpu,cpu", "--log-format", "json", "--unresponsive-seconds", "5"]
    with serving(checkpoints("qwen2_vl"), *flags, wait=False) as supervisor:
        supervisor.wait_for('(?s)("message": "ready: .*){2}')
        assert supervisor.log().count(f", with {share_of_cores(2)} CPU threads for torch") == 2
        stopped = psutil.Process(supervisor.process.pid).children()[0]
        stopped.send_signal(signal.SIGSTOP)
        label = supervisor.wait_for(r"(cpu\.\d) was stopped \(SIGSTOP\) for 5 s; killing it")[1]
        supervisor.wait_for(rf'(?s)("process": "{label}", [^\n]*"message": "ready: .*){{2}}')
        assert not stopped.is_running()
        assert supervisor.stop() == 0
        lines = [json.loads(line) for line in supervisor.log().splitlines()]
        assert all(line["message"] for line in lines)


@pytest.mark.matrix
async def test_asynchronous_calls_end_as_well(checkpoints: Checkpoints) -> None:
    with supervised(checkpoints("qwen2_vl")) as (supervisor, children):
        async with AsyncClient(f"ipv4:{','.join(child.target for child in children)}", timeout=4) as client:
            assert len(await client.encode(ITEMS)) == len(ITEMS)
            for process in psutil.Process(supervisor.process.pid).children():
                process.kill()
            calls = [client.encode(ITEMS[:1]) for _ in range(8)]
            outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
            assert all(isinstance(each, Unavailable | DeadlineExceeded) for each in outcomes), outcomes
            for label in LABELS:
                supervisor.wait_for(rf"(?s)(\[{label}\] ready: .*){{2}}")
            async with asyncio.timeout(60):  # gRPC connects again in its own time
                while True:
                    with suppress(Unavailable):
                        assert len(await client.encode(ITEMS)) == len(ITEMS)
                        break


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for it")
def test_no_process_outlives_a_killed_supervisor(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Killed while its processes start."""
    ports = ("--port", "0", "--metrics-port", "0")
    command = ["serve", "--model", str(checkpoints("qwen2_vl")), "--devices", "cpu,cpu", *PIXELS_ONLY, *ports]
    with (tmp_path / "log").open("wb") as log, spawn(SERVER, command, log) as supervisor:
        deadline = time.monotonic() + 60
        while len(processes := psutil.Process(supervisor.pid).children()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        supervisor.kill()
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive


@pytest.mark.matrix
def test_ports_and_socket_are_numbered(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Each process has a front end for HTTP, too, which ends with it."""
    socket = tmp_path / "vitwire.sock"
    with supervised(checkpoints("qwen2_vl"), "--unix-socket", str(socket), "--http-port", "0") as (supervisor, _):
        for index in range(2):
            with Client(f"unix:{socket}.{index}") as client:
                assert client.health() == "SERVING"
            port = supervisor.wait_for(rf"\[cpu\.{index}\] HTTP on (127\.0\.0\.1:\d+)")[1]
            until(lambda port=port: httpx2.get(f"http://{port}/health", timeout=60).status_code == 200)
            supervisor.wait_for(rf"\[cpu\.{index}/http\] ")
        processes = psutil.Process(supervisor.process.pid).children(recursive=True)
        supervisor.process.kill()
        assert not psutil.wait_procs(processes, timeout=10)[1]


def test_a_wrong_model_ends_with_one_sentence() -> None:
    ports = ("--port", "0", "--metrics-port", "0")
    done = finished("serve", "--model", "/nowhere", "--devices", "cpu,cpu", *ports)
    assert done.returncode == 1
    where = "/nowhere does not exist in the directory /"
    reason = f"{where}: expected a directory or a hub id, such as owner/name"
    assert done.stderr == f"vitwire-server: {reason}\n"


@pytest.mark.matrix
def test_sigint_drains_as_well(checkpoints: Checkpoints) -> None:
    with supervised(checkpoints("qwen2_vl"), ready=False) as (supervisor, _):
        supervisor.process.send_signal(signal.SIGINT)
        assert supervisor.process.wait(60) == 0
