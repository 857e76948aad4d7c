"""A consumer of rows in a process of its own: registers memory with NIXL, and reports what was written there.

Run as a program, it reads commands from stdin: `sum OFFSET BYTES`, `zero`.
"""

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitwire.shared.agents import Agent, Memory
from vitwire_server.core.delivery import Consumer, MemoryKind

_MAP_FIXED_NOREPLACE = 0x100000


@dataclass(slots=True)
class ConsumerProcess:
    """A consumer that this process started."""

    process: subprocess.Popen[str]
    agent: str
    metadata: bytes
    address: int
    nbytes: int

    def consumer(self, principal: str = "", **changed: Any) -> Consumer:
        """The consumer as a request describes it."""
        fields = {name: getattr(self, name) for name in ("agent", "metadata", "address", "nbytes")}
        return Consumer(**{"principal": principal, "memory": MemoryKind.HOST, "device": 0, **fields, **changed})

    def sums(self, offset: int, nbytes: int) -> dict[str, int]:
        """How many bytes of each value there are."""
        counts: dict[str, int] = json.loads(self.command(f"sum {offset} {nbytes}"))
        return counts

    def command(self, line: str) -> str:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def stop(self) -> None:
        """Suspend it."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def consuming(
    nbytes: int, device: int | None = None, *, at: int = 0, transports: str = ""
) -> Iterator[ConsumerProcess]:
    """A consumer with so much memory, on the host or a CUDA device; killed at the end of the block.

    Host memory may be `at` an address; `transports` are those of UCX, all unless given.
    """
    command = [sys.executable, str(Path(__file__)), str(nbytes), "" if device is None else str(device), str(at)]
    environment = os.environ | {"UCX_MEM_MMAP_HOOK_MODE": "none"}  # a start with hooks takes 0.4 s more
    environment |= {"UCX_TLS": transports} if transports else {}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout
            started = json.loads(process.stdout.readline())
            metadata = bytes.fromhex(started["metadata"])
            yield ConsumerProcess(process, started["agent"], metadata, started["address"], nbytes)
        finally:
            process.kill()


def mapped_at(address: int, nbytes: int) -> np.ndarray:
    """New memory at an address that nothing else is at."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(3 * (ctypes.c_int,)), ctypes.c_long)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    found = libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert found == address, "the address is free"
    return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))


def main(nbytes: int, device: int | None, at: int) -> None:
    agent = Agent(uuid.uuid4().hex)
    if at:
        memory: Any = mapped_at(at, nbytes)
        address = at
    elif device is None:
        memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        address = memory.ctypes.data
    else:
        import torch  # noqa: PLC0415 - slow, and not needed on the host

        memory = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
        torch.cuda.synchronize()
        address = memory.data_ptr()
    agent.register(Memory(address, nbytes, device))
    started = {"agent": agent.name, "metadata": agent.metadata.hex(), "address": address}
    print(json.dumps(started), flush=True)

    def progress() -> None:
        while True:
            agent.progress()
            time.sleep(0.0005)

    threading.Thread(target=progress, daemon=True).start()
    for line in sys.stdin:
        match line.split():
            case ["sum", offset, count]:
                part = memory[int(offset) : int(offset) + int(count)]
                values, counts = np.unique(part if device is None else part.cpu().numpy(), return_counts=True)
                print(json.dumps(dict(zip(map(int, values), map(int, counts), strict=True))), flush=True)
            case ["zero"]:
                memory[:] = 0
                print("done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2] else None, int(sys.argv[3]))
