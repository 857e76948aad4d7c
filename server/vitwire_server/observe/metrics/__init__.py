"""Prometheus metrics, one class per concern. A new metric goes into the class of the code that records it.

Label values come from closed sets; nothing a client sends becomes a label.
"""

import os
from functools import partial

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

from vitwire_server.core.health import Health, State
from vitwire_server.observe.metrics.engine import EngineMetrics, LadderMetrics, MemoryMetrics, ModelMetrics
from vitwire_server.observe.metrics.processes import ENGINE, ProcessMetrics
from vitwire_server.observe.metrics.rpc import RpcMetrics
from vitwire_server.observe.metrics.series import Series
from vitwire_server.observe.metrics.sessions import AdmissionMetrics, CacheMetrics, DeliveryMetrics


class Metrics:
    """All metrics of one server, in their own registry. prometheus_client is thread-safe.

    At all times `vitwire_items_total` equals graph hits + eager fallbacks + cache hits.
    """

    def __init__(self, health: Health | None = None) -> None:
        """`health` is the server's, read at each scrape; without one the server counts as starting."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # series that double the exposition
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # of this process: memory, CPU time, descriptors, start time
        series = Series(self.registry)
        self.rpc = RpcMetrics(series)
        self.admission = AdmissionMetrics(series)
        self.cache = CacheMetrics(series)
        self.memory = MemoryMetrics(series)
        self.engine = EngineMetrics(series, self.memory)
        self.delivery = DeliveryMetrics(series)
        self.model = ModelMetrics(series)
        self.ladder = LadderMetrics(series)
        health = health or Health()
        states = series.gauge("server_state", "1 for the state that the server is in, else 0", state=())
        for state in State:
            states.labels(state.value).set_function(partial(_is_in, health, state))
        self.processes = ProcessMetrics(self.registry)
        self.processes.started(ENGINE, os.getpid())


def _is_in(health: Health, state: State) -> float:
    return float(health.state is state)
