"""Prometheus metrics, one class per concern. A new metric goes into the class of the code that records it.

Label values come from closed sets; nothing a client sends becomes a label.
"""

import os

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

from vitwire_server.core.health import Health
from vitwire_server.observe.metrics.admission import AdmissionMetrics
from vitwire_server.observe.metrics.cache import CacheMetrics
from vitwire_server.observe.metrics.delivery import DeliveryMetrics
from vitwire_server.observe.metrics.engine import EngineMetrics
from vitwire_server.observe.metrics.ladder import LadderMetrics
from vitwire_server.observe.metrics.memory import MemoryMetrics
from vitwire_server.observe.metrics.model import ModelMetrics, StateMetrics
from vitwire_server.observe.metrics.processes import ENGINE, ProcessMetrics
from vitwire_server.observe.metrics.rpc import RpcMetrics
from vitwire_server.observe.metrics.series import Series, Shared


class Metrics:
    """All metrics of one server, in their own registry. prometheus_client is thread-safe.

    At all times `vitwire_items_total` equals graph hits + eager fallbacks + cache hits.
    """

    def __init__(self, health: Health | None = None) -> None:
        """`health` is the server's; without one the state is that of a server that starts."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # series that double the exposition
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # of this process: memory, CPU time, descriptors, start time
        series = Series(self.registry)
        shared = Shared(series)
        self.rpc = RpcMetrics(series, shared)
        self.admission = AdmissionMetrics(series)
        self.cache = CacheMetrics(series, shared)
        self.memory = MemoryMetrics(series)
        self.engine = EngineMetrics(series, shared, self.memory)
        self.delivery = DeliveryMetrics(series, shared)
        self.model = ModelMetrics(series)
        self.ladder = LadderMetrics(series)
        self.state = StateMetrics(series, health or Health())
        self.processes = ProcessMetrics(self.registry)
        self.processes.started(ENGINE, os.getpid())
