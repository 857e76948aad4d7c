"""Cores and memory available to this process, on a machine or in a container. Does not import torch."""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

THREADS = "OMP_NUM_THREADS"
"""Read by OpenMP, MKL and OpenBLAS when torch and numpy are imported."""
_ROOT = Path("/")
_UNLIMITED = 1 << 60
_CORES_OF_PROCESS = 2
_MOST_DECODE_PROCESSES = 8
_MOST_RPC_PROCESSES = 6
"""Six bare gRPC servers send 10 GB/s, three times what one H200 encodes."""


def cores(root: Path = _ROOT) -> int:
    """Physical cores this process may run on: CPU affinity and cgroup quota applied, at least 1."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    physical = len({_siblings(root, cpu) for cpu in allowed})
    return max(1, min([physical, *(math.ceil(quota) for quota in _quotas(root))]))


def memory_limit(root: Path = _ROOT) -> int | None:
    """Lowest memory limit, in bytes, of the cgroups of this process; None without a limit."""
    values = [value for _, value in _values(root, "memory", "memory.max", "memory.limit_in_bytes")]
    limits = [int(value) for value in values if value.isdigit() and int(value) < _UNLIMITED]
    return min(limits, default=None)


def share_of_cores(processes: int, reserved: int = 0, root: Path = _ROOT) -> int:
    """Threads for each of `processes` on this machine, with `reserved` cores left free; at least 1."""
    return max(1, (cores(root) - reserved) // max(1, processes))


def rpc_processes(wanted: int | None, *, cuda_devices: int, root: Path = _ROOT) -> int:
    """Processes that serve RPCs for each of `cuda_devices` on this machine; `wanted` if it is set.

    A process takes up to two cores under load: one for its event loop, one for gRPC's threads and the copies of the
    kernel. As much is left to the process that drives the device.
    """
    if wanted:
        return wanted
    if not cuda_devices or sys.platform != "linux":
        return 1
    available = cores(root) // cuda_devices
    return max(1, min(_MOST_RPC_PROCESSES, available // _CORES_OF_PROCESS - 1))


def decode_processes(wanted: int | None, *, devices: int, root: Path = _ROOT) -> int:
    """Processes that decode files for each of `devices` on this machine; `wanted` if it is set."""
    if wanted is not None:
        return wanted
    if sys.platform != "linux":
        return 0
    return max(1, min(_MOST_DECODE_PROCESSES, cores(root) // (2 * max(1, devices))))


def _siblings(root: Path, cpu: int) -> str:
    """The core that a hardware thread belongs to, as the list of the core's threads."""
    with suppress(OSError):
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    return str(cpu)


def _quotas(root: Path) -> Iterator[float]:
    for folder, value in _values(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, _, period = value.partition(" ")
        with suppress(OSError, ValueError):  # "max" and -1 mean no quota
            cycle = int(period or (folder / "cpu.cfs_period_us").read_text())
            if int(quota) > 0 and cycle > 0:
                yield int(quota) / cycle


def _values(root: Path, controller: str, name: str, name_v1: str) -> Iterator[tuple[Path, str]]:
    """A limit's text in each cgroup, from this process's cgroup up to the mounted root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        innermost = top / path.strip("/")
        for folder in (
            innermost,
            *(parent for parent in innermost.parents if parent.is_relative_to(top)),
        ):
            with suppress(OSError):
                yield folder, (folder / (name_v1 if controllers else name)).read_text().strip()
