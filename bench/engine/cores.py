"""What processes may use and what they used: processor cores, processor seconds, device memory."""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
from bench.client_processes import cpu_seconds

Row = dict[str, Any]
MIB = 1 << 20


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Processes that this thread starts in the block run on these cores; all others if there are none."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def divided(clients: int) -> tuple[list[int], list[int]]:
    """The cores of the clients, and the others, which each setup has; both have all if there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) <= 2 * clients:
        return cores, cores
    return cores[-clients:], cores[:-clients]


def used(groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Processor seconds so far, by group of processes; with their descendants."""
    return {name: cpu_seconds(pids) for name, pids in groups.items()}


def cards() -> list[Row]:
    """Each device: name, driver, MiB in use and in all; none without NVIDIA's driver."""
    lines = _asked("--query-gpu=name,driver_version,uuid,memory.used,memory.total")
    return [
        {"name": name, "driver": driver, "uuid": uuid, "used_mib": int(used), "total_mib": int(total)}
        for name, driver, uuid, used, total in lines
        if used.isdecimal() and total.isdecimal()
    ]


def device_memory(groups: Mapping[str, Sequence[int]]) -> dict[str, int | None]:
    """MiB of devices that each group of processes holds, and all together; null where the driver does not tell.

    Under MPS the driver may count the memory of clients as the daemon's; the sum is right then too.
    """
    total = sum(card["used_mib"] for card in cards())
    held = {int(pid): int(mib) for pid, mib in _asked("--query-compute-apps=pid,used_memory") if mib.isdecimal()}
    found: dict[str, int | None] = {}
    for name, pids in groups.items():
        mine = [held[pid] for pid in _families(pids) if pid in held]
        found[name] = sum(mine) if mine else None
    return found | {"all": total or None}


def _families(pids: Sequence[int]) -> set[int]:
    found: set[int] = set()
    for pid in pids:
        try:
            found |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
    return found


def _asked(query: str) -> list[list[str]]:
    """The lines of nvidia-smi about visible devices, split; none if it is not there."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    command += ["-i", os.environ["CUDA_VISIBLE_DEVICES"]] if os.environ.get("CUDA_VISIBLE_DEVICES") else []
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.split(", ") for line in answer.stdout.splitlines() if line.strip()]
