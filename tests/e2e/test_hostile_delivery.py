"""Clients that lie about their memory to NIXL: nobody else's memory changes, and nobody else notices."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np
import psutil
import pytest

from entered import entered
from load import image, request
from nixl_consumer import ConsumerProcess, consuming
from servers import PIXELS_ONLY, ServerProcess, serving
from vitwire.shared.agents import is_installed
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")
NBYTES = 1 << 20
FAR = 0x5000_0000_0000
"""An address at which nothing is."""
BYSTANDER = f"""
import sys
sys.path[:0] = {sys.path!r}
from nixl_consumer import mapped_at
memory = mapped_at({FAR}, {NBYTES})
memory[:] = 5
print("ready", flush=True)
for _ in sys.stdin:
    print(int((memory != 5).sum()), flush=True)
"""


FLAGS = ("--nixl", "--nixl-seconds", "10", "--graphs", "off", *PIXELS_ONLY, "--rpc-processes")
ALL = dict.fromkeys(("UCX_TLS", "UCX_MODULES"), "all")
"""What UCX may do does not depend on the server's environment."""

server = entered(
    lambda checkpoints, request: serving(checkpoints("qwen2_vl"), *FLAGS, request.param, variables=ALL),
    params=[pytest.param("1", marks=pytest.mark.matrix), "2"],
)


@contextmanager
def bystander() -> Iterator["subprocess.Popen[str]"]:
    """A process of the same user with memory at FAR."""
    with subprocess.Popen(
        [sys.executable, "-c", BYSTANDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def changed(process: "subprocess.Popen[str]") -> int:
    """Bytes of a bystander that somebody wrote."""
    assert process.stdin
    assert process.stdout
    process.stdin.write("?\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def answer(
    server: ServerProcess, consumer: ConsumerProcess, metadata: bytes, agent: str = "", *, on_device: bool = False
) -> str:
    """How an item is answered whose rows are to go to a consumer: "placed", or why they were not."""
    made = request(image(4, 4))
    made.delivery.CopyFrom(
        pb.Delivery(
            agent=agent or consumer.agent,
            agent_metadata=metadata,
            memory=pb.MEMORY_KIND_DEVICE if on_device else pb.MEMORY_KIND_HOST,
            address=consumer.address,
            bytes=consumer.nbytes,
        )
    )
    made.items[0].region.CopyFrom(pb.Region(offset=0, bytes=4096))
    with grpc.insecure_channel(server.target) as channel:
        last = list(EncoderServiceStub(channel).Encode(made, timeout=120))[-1]
    return "placed" if last.HasField("placement") else last.report.delivery_fallback


REPLACED = {"vitwire_server.delivery.factory", "vitwire_server.runtime.compiler"}
"""What an engine starts again, or only once many items of one shape have come."""


def processes(server: ServerProcess) -> list[int]:
    """The engine and its edges."""
    engine = psutil.Process(server.process.pid)
    return [
        engine.pid,
        *sorted(each.pid for each in engine.children() if not REPLACED.intersection(each.cmdline())),
    ]


def check_honest(server: ServerProcess) -> None:
    with consuming(NBYTES) as honest:
        assert answer(server, honest, honest.metadata) == "placed", server.log()[-2000:]
        assert set(honest.sums(0, 4096)) != {"0"}


def renamed(consumer: ConsumerProcess, metadata: bytes, number: int) -> tuple[str, bytes]:
    """The metadata of another agent."""
    name = f"{number:032x}"
    return name, metadata.replace(consumer.agent.encode(), name.encode())


def key_of(metadata: bytes) -> int:
    """Where the remote key begins: after the address, the size and the device of the only range."""
    return metadata.rindex(NBYTES.to_bytes(8, "little")) + 16


def test_a_device_that_the_server_cannot_reach(server: ServerProcess) -> None:
    """The reason is not one for which a client tries again at once, and the item is counted."""
    before = server.metric("vitwire_delivery_fallbacks_total", reason="off")
    with consuming(NBYTES) as consumer:
        assert answer(server, consumer, consumer.metadata, on_device=True) == "off"
    assert server.metric("vitwire_delivery_fallbacks_total", reason="off") == before + 1


@pytest.mark.parametrize(
    "transports",
    ["tcp,cma", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("tcp,posix", "tcp,sysv")), "all"],
)
def test_forged_processes_get_nothing(server: ServerProcess, transports: str) -> None:
    """The process in a remote key is a bystander that has memory at the same address."""
    before = processes(server)
    with bystander() as victim, consuming(NBYTES, at=FAR, transports=transports) as forger:
        pid = forger.process.pid.to_bytes(4, "little")
        metadata = forger.metadata.replace(pid, victim.pid.to_bytes(4, "little"))
        assert metadata != forger.metadata or transports not in ("tcp,cma", "all")
        answer(server, forger, metadata)
        assert changed(victim) == 0
    assert processes(server) == before
    check_honest(server)


def test_a_key_of_other_domains_ends_no_server(server: ServerProcess) -> None:
    before = processes(server)
    with consuming(NBYTES) as forger:
        for number in range(6):
            name, metadata = renamed(forger, forger.metadata, number + 1)
            forged = bytearray(metadata)
            forged[key_of(metadata)] = 0x6A
            answer(server, forger, bytes(forged), name)
    assert processes(server) == before
    check_honest(server)


@pytest.mark.parametrize("count", [12, pytest.param(400, marks=pytest.mark.matrix)])
@pytest.mark.timeout(1800)
def test_random_metadata_ends_no_server(server: ServerProcess, count: int) -> None:
    before, random = processes(server), np.random.default_rng(count)
    with bystander() as victim, consuming(NBYTES, at=FAR) as forger:
        start = forger.metadata.index(b"Conns")  # what comes before must belong to the name

        def attack(number: int) -> str:
            name, metadata = renamed(forger, forger.metadata, 1000 * count + number)
            forged = bytearray(metadata)
            for at, value in flips[number]:
                forged[start + at] = value
            return answer(server, forger, bytes(forged), name)

        size = len(forger.metadata) - start
        flips = [
            [(int(random.integers(size)), int(random.integers(256))) for _ in range(random.integers(1, 4))]
            for _ in range(count)
        ]
        with ThreadPoolExecutor(4) as threads:
            outcomes = list(threads.map(attack, range(count)))
        assert changed(victim) == 0
    print({each: outcomes.count(each) for each in set(outcomes)})
    assert processes(server) == before
    check_honest(server)


def test_agents_of_one_client_do_not_delay_another(server: ServerProcess) -> None:
    """Nor do they use up the server's descriptors."""
    files = psutil.Process(server.process.pid).num_fds()
    with consuming(NBYTES) as forger, consuming(NBYTES) as honest:

        def attack(number: int) -> str:
            name, metadata = renamed(forger, forger.metadata, (1 << 40) + number)
            return answer(server, forger, metadata[: len(metadata) - 200] + bytes(200), name)

        with ThreadPoolExecutor(60) as threads:
            attacks = [threads.submit(attack, number) for number in range(60)]
            assert answer(server, honest, honest.metadata) in ("placed", "busy")
            assert not any(each.exception() for each in attacks)
    check_honest(server)
    assert psutil.Process(server.process.pid).num_fds() < files + 40


def status_of(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status."""
    with open(f"/proc/{pid}/status") as file:  # noqa: PTH123
        return dict(line.rstrip().split(":", 1) for line in file)


def test_senders_have_no_privileges(server: ServerProcess) -> None:
    check_honest(server)
    (factory,) = [
        each for each in psutil.Process(server.process.pid).children() if "delivery.factory" in str(each.cmdline())
    ]
    for sender in factory.children():
        status = status_of(sender.pid)
        for _ in range(600):  # one that was just forked confines itself before it is used
            if status["Seccomp"].strip() == "2":
                break
            time.sleep(0.1)
            status = status_of(sender.pid)
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
        assert (status["NoNewPrivs"].strip(), status["Seccomp"].strip()) == ("1", "2")
        if os.geteuid() == 0:
            assert sender.uids().effective == 65534
