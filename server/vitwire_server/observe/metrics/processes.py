"""Metrics of the operating system's processes that serve one device. Recorded on the event loop."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

ENGINE = "engine"
"""The process that owns the device; with one process it also serves RPCs."""


class ProcessMetrics(Collector):
    """CPU time, memory and restarts of each process."""

    _labelnames = ("process",)  # as in prometheus_client's own metrics

    def __init__(self, registry: CollectorRegistry) -> None:
        self._running: dict[str, ProcessCollector] = {}
        self._starts: dict[str, int] = {}
        registry.register(self)

    def expect(self, labels: Iterable[str]) -> None:
        """Show the restarts of these processes from the start."""
        self._starts |= dict.fromkeys(labels, 0)

    def started(self, label: str, pid: int) -> None:
        """A process was started, for the first time or again."""
        self._running[label] = ProcessCollector(pid=lambda: str(pid), registry=None)
        if label in self._starts:
            self._starts[label] += 1

    def ended(self, label: str) -> None:
        self._running.pop(label, None)

    def describe(self) -> Iterator[Metric]:
        """Called by the registry: the families without samples."""
        yield from self._families()

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, on any thread. Without /proc only restarts are known."""
        cpu, memory, restarts = self._families()
        for label, process in list(self._running.items()):
            values = {family.name: family.samples[0].value for family in process.collect() if family.samples}
            if "process_cpu_seconds" in values:
                cpu.add_metric([label], values["process_cpu_seconds"])
                memory.add_metric([label], values["process_resident_memory_bytes"])
        for label, starts in list(self._starts.items()):
            restarts.add_metric([label], max(0, starts - 1))
        yield from (cpu, memory, restarts)

    def _families(self) -> tuple[CounterMetricFamily, GaugeMetricFamily, CounterMetricFamily]:
        labels = self._labelnames
        return (
            CounterMetricFamily("vitwire_process_cpu_seconds", "CPU time of each process", labels=labels),
            GaugeMetricFamily("vitwire_process_resident_memory_bytes", "Memory of each process", labels=labels),
            CounterMetricFamily("vitwire_process_restarts", "Restarts of each RPC process", labels=labels),
        )
