"""What a process may use of its machine, and the threads that torch gets of it."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from vitwire_server import release
from vitwire_server.config.host import THREADS, cores, memory_limit, rpc_processes, share_of_cores

GIB = 1 << 30


def files(root: Path, **contents: str) -> Path:
    """A tree with these files, their paths written with __ for / and dots kept."""
    for name, text in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.fixture
def four_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight hardware threads of four cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    siblings = {
        f"sys__devices__system__cpu__cpu{n}__topology__thread_siblings_list": f"{n % 4},{n % 4 + 4}" for n in range(8)
    }
    return files(tmp_path, **siblings)


def test_hardware_threads_of_a_core_count_once(four_cores: Path) -> None:
    assert cores(four_cores) == 4
    assert share_of_cores(3, root=four_cores) == 1
    assert share_of_cores(2, root=four_cores) == 2
    assert share_of_cores(1, 2, root=four_cores) == 2
    assert share_of_cores(9, root=four_cores) == share_of_cores(0, 9, root=four_cores) == 1


@pytest.mark.parametrize(
    ("quota", "expected"), [("150000 100000", 2), ("max 100000", 4), ("900000 100000", 4), ("1000 100000", 1)]
)
def test_a_quota_of_a_parent_cgroup_bounds_the_cores(four_cores: Path, quota: str, expected: int) -> None:
    files(four_cores, proc__self__cgroup="0::/pod/box", **{"sys__fs__cgroup__pod__cpu.max": quota})
    files(four_cores, **{"sys__fs__cgroup__pod__box__cpu.max": "max 100000"})
    assert cores(four_cores) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="1 elsewhere")
@pytest.mark.parametrize(
    ("cpus", "devices", "expected"), [(2, 1, 1), (4, 1, 1), (8, 1, 3), (16, 1, 6), (128, 1, 6), (16, 2, 3), (8, 8, 1)]
)
def test_rpc_processes_follow_the_cores_of_a_device(
    cpus: int, devices: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)), raising=False)
    assert rpc_processes(None, cuda_devices=devices, root=tmp_path) == expected
    assert rpc_processes(None, cuda_devices=0, root=tmp_path) == 1, "on CPU"
    assert rpc_processes(5, cuda_devices=0, root=tmp_path) == 5, "as the flag says"


def test_cgroups_of_version_1(four_cores: Path) -> None:
    """In a container the path is often the host's, of which only the root is mounted."""
    files(four_cores, proc__self__cgroup="3:cpu,cpuacct:/host/path\n2:memory:/host/path\n1:name=systemd:/")
    assert (cores(four_cores), memory_limit(four_cores)) == (4, None)
    limits = {
        "cpu__cpu.cfs_quota_us": "200000",
        "cpu__cpu.cfs_period_us": "100000",
        "memory__memory.limit_in_bytes": str(GIB),
    }
    files(four_cores, **{f"sys__fs__cgroup__{name}": value for name, value in limits.items()})
    assert (cores(four_cores), memory_limit(four_cores)) == (2, GIB)
    files(four_cores, **{"sys__fs__cgroup__memory__memory.limit_in_bytes": "9223372036854771712"})
    files(four_cores, **{"sys__fs__cgroup__cpu__cpu.cfs_quota_us": "-1"})
    assert (cores(four_cores), memory_limit(four_cores)) == (4, None)


def test_the_lowest_memory_limit_counts(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None, "no cgroups at all"
    files(tmp_path, proc__self__cgroup="0::/pod/box", **{"sys__fs__cgroup__pod__memory.max": str(2 * GIB)})
    files(tmp_path, **{"sys__fs__cgroup__pod__box__memory.max": "max"})
    assert memory_limit(tmp_path) == 2 * GIB


@pytest.mark.parametrize(
    ("device", "explicit", "expected"),
    [
        ("cuda:0", None, "1"),
        ("auto", None, str(cores())),
        ("cpu", None, str(cores())),
        ("cuda", str(cores()), str(cores())),
        ("auto", "1", "1"),
    ],
)
def test_torch_gets_the_threads_of_its_device(device: str, explicit: str | None, expected: str) -> None:
    """`auto` is CPU here. OMP_NUM_THREADS of the user always wins."""
    script = (
        "import os, sys; from vitwire_server.__main__ import _import_torch; _import_torch(sys.argv[1]); "
        "import torch; print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])"
    )
    environment = {name: value for name, value in os.environ.items() if name not in (THREADS, "MKL_NUM_THREADS")}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} | ({THREADS: explicit} if explicit else {})
    done = subprocess.run(
        [sys.executable, "-c", script, device], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == [expected, expected]


def test_a_source_tree_that_is_not_installed_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(release, "version", missing)
    assert release.release.__wrapped__() == release.UNRELEASED
