"""Metrics of several processes on one page: edge processes record in files, which the engine process adds up.

An edge's counts outlive it: each value is in memory mapped from a file (prometheus_client's multiprocess mode).
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from vitwire_server.observe.metrics.rpc import RpcMetrics
from vitwire_server.observe.metrics.series import Series

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Read by prometheus_client when it is imported."""
_PREFIX = "vitwire-metrics-"
_IN_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder in it is private
"""Writes to mapped files on a disk may wait for the disk."""
_ROOM = 4 << 20
"""Free bytes that the files of all edges, and of their successors, fit into."""
_FILES = ("counter", "gauge_livesum", "gauge_livemin", "histogram")
_FILE_BYTES = 1 << 16
"""The size that prometheus_client gives a new file; the edges' labels are few and need a third of it."""
_LOCK = "lock"


def edge_metrics() -> RpcMetrics:
    """The metrics of an edge process, which was started with `EdgeMetrics.environment`.

    Raises OSError if there is no room for their files.
    """
    folder = os.environ.get(_VARIABLE)
    if not folder:
        raise RuntimeError(f"{_VARIABLE} is not set: the engine process sets it for its edges")
    for name in _FILES:
        _reserve(Path(folder) / f"{name}_{os.getpid()}.db")
    return RpcMetrics(Series(CollectorRegistry()))


class EdgeMetrics(Collector):
    """The engine process's side: the folder of the edges' files, and a registry with the sums over all processes."""

    def __init__(self, engine: CollectorRegistry) -> None:
        """`engine` has the engine process's metrics, with every metric that edges record at zero."""
        self._engine = engine
        self._lock = Lock()  # files are removed on the event loop and read on other threads
        self._ended: list[Metric] = []
        _remove_abandoned()
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_root()))
        self._owner = _locked(self._folder)
        self.registry = CollectorRegistry()
        """Shown by the metrics port."""
        self.registry.register(self)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for edge processes only."""
        return {_VARIABLE: str(self._folder)}

    def edge_ended(self, pid: int) -> None:
        """Keep the counts of an edge process that has ended, drop its gauges and remove its files."""
        with self._lock:
            mark_process_dead(pid, str(self._folder))  # type: ignore[no-untyped-call]
            files = [each for each in self._files() if each.stem.rpartition("_")[2] == str(pid)]
            self._ended = merged([*self._ended, *_read(files)])
            for file in files:
                file.unlink()

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, on any thread."""
        with self._lock:
            edges = [*self._ended, *_read(self._files())]
        yield from merged([*self._engine.collect(), *edges])

    def close(self) -> None:
        with self._lock:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._owner)

    def _files(self) -> list[Path]:
        """An edge that is just starting has empty ones."""
        return [each for each in self._folder.glob("*.db") if each.stat().st_size]


def _remove_abandoned() -> None:
    """Remove the folders of engine processes that were killed."""
    for lock in [each for root in _roots() for each in root.glob(f"{_PREFIX}*/{_LOCK}")]:
        with suppress(OSError):  # another user's, in use, or just removed
            descriptor = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def _roots() -> tuple[Path, Path]:
    return _IN_MEMORY, Path(tempfile.gettempdir())


def _root() -> Path:
    """Where to make a folder: in memory if that is possible and has room."""
    in_memory, elsewhere = _roots()
    usable = os.access(in_memory, os.W_OK) and shutil.disk_usage(in_memory).free >= _ROOM
    return in_memory if usable else elsewhere


def _reserve(file: Path) -> None:
    """Give a file its pages now: a write to a mapped page for which there is no room ends the process with SIGBUS."""
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _FILE_BYTES)
    except OSError as error:
        raise OSError(error.errno, f"no room for metrics: {error.strerror}", str(file.parent)) from error
    finally:
        os.close(descriptor)


def merged(families: Iterable[Metric]) -> list[Metric]:
    """One family for each name, its samples added by labels."""
    found: dict[str, Metric] = {}
    sums: dict[str, dict[tuple[tuple[str, str], ...], dict[tuple[str, str], Sample]]] = {}
    for family in families:
        found.setdefault(family.name, Metric(family.name, family.documentation, family.type, family.unit))
        groups = sums.setdefault(family.name, {})
        for sample in family.samples:
            labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
            group, key = groups.setdefault(labels, {}), (sample.name, sample.labels.get("le", ""))
            held = group.get(key)
            group[key] = held._replace(value=held.value + sample.value) if held else sample
    for name, groups in sums.items():
        found[name].samples = [each for group in groups.values() for each in sorted(group.values(), key=_order)]
    return list(found.values())


def _order(sample: Sample) -> tuple[bool, float, str]:
    """Buckets by their bound, then count and sum, as the exposition formats require."""
    bound = sample.labels.get("le")
    return bound is None, float(bound or 0), sample.name


def _read(files: Iterable[Path]) -> Iterable[Metric]:
    families: Iterable[Metric] = MultiProcessCollector.merge([str(each) for each in files])  # type: ignore[no-untyped-call]
    return families


def _locked(folder: Path) -> int:
    """The descriptor of a lock that this process holds while it lives; edges do not inherit it."""
    unnamed = folder / f"{_LOCK}.new"
    descriptor = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unnamed.rename(folder / _LOCK)
    return descriptor
