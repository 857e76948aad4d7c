"""Prometheus metrics. Label values come from closed sets; nothing a client sends becomes a label."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

from vitwire_server.core.budgets import Budget
from vitwire_server.core.errors import NonFinite
from vitwire_server.core.items import Modality
from vitwire_server.core.plans import Fallback
from vitwire_server.core.reports import BatchReport, Path

_MILLISECONDS = (0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 75, 100, 150, 250, 500)
_SECONDS = (*(each / 1000 for each in _MILLISECONDS), 1.0, 2.5, 5.0, 10.0, 30.0)
_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128)
_RATIOS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)

ITEM_CODES = (
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "INTERNAL",
)
"""Names of gRPC's codes that an item may fail with."""


class Metrics:
    """All metrics of one server, in a registry of its own; implements core's `Monitor`.

    At all times `vitwire_items_total` equals graph hits + eager fallbacks + cache hits.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # series that double the exposition
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, processor time, descriptors, start time
        counter, gauge = self._counter, self._gauge
        self.requests = counter("requests", "RPCs by method and status code", "method", "code")
        self._items = counter("items", "Items encoded, by path", "modality", "path")
        self._items_failed = counter("items_failed", "Items answered with an error of their own", "code")
        self._received = counter("received_bytes", "Bytes of request messages with items")
        self._delivered = counter("delivered_bytes", "Bytes of rows sent to clients", "way")
        self._hits = counter("graph_hits", "Items encoded by a replay", "modality", "budget")
        self._replays = counter("graph_replays", "Replays", "budget")
        self._fallbacks = counter("eager_fallbacks", "Items encoded eagerly, and why", "modality", "reason")
        self._graph_tokens = counter("graph_tokens", "Tokens computed by replays", "budget", "kind")
        self._tokens = counter("tokens", "Tokens computed", "kind")
        self._batch_items = self._histogram("batch_items", "Items of a batch", _ITEMS)
        self._batch_requests = self._histogram("batch_requests", "Requests that a batch has items of", _ITEMS)
        self._fill = self._histogram("batch_fill_ratio", "Real tokens of a replay over its budget", _RATIOS)
        self._stages = self._histogram("stage_seconds", "Time by stage", _SECONDS, "stage")
        self.request_seconds = self._histogram("request_seconds", "Time of an RPC", _SECONDS, "method")
        self._queue_items = gauge("queue_items", "Items that wait")
        self._queue_bytes = gauge("queue_bytes", "Bytes of pixels that wait")
        self.inflight = gauge("inflight_requests", "RPCs that carry items, in flight")
        self.rejected = counter("rejected", "Requests turned away", "reason")
        self._cancelled = counter("cancelled", "Items dropped or finished unseen", "stage")
        self._expired = counter("expired", "Items whose deadline passed, or could not be met, by stage", "stage")
        self._limit_items = gauge("queue_limit_items", "Items that may be admitted at once")
        self._limit_bytes = gauge("queue_limit_bytes", "Bytes that may be admitted at once")
        self._admitted_items = gauge("admitted_items", "Items that permits are out for")
        self._admitted_bytes = gauge("admitted_bytes", "Bytes that permits are out for")
        self.tickets_opened = counter("tickets_opened", "RPCs that opened a ticket")
        self.tickets_closed = counter("tickets_closed", "RPCs that closed their ticket")
        self._cache_hits = counter("cache_hits", "Items answered from the cache, or by another item's forward")
        self._cache_misses = counter("cache_misses", "Items looked for in the cache in vain")
        self._cache_evictions = counter("cache_evictions", "Embeddings that left the cache for others")
        self._cache_bytes = gauge("cache_bytes", "Bytes of cached embeddings")
        self._canaries = counter("canaries", "Forwards of the canary while idle", "result")
        self._captured = gauge("graphs_captured", "Budgets with a graph")
        self._dropped = gauge("graphs_dropped", "Budgets whose capture failed")
        self._capture_seconds = gauge("graph_capture_seconds", "Time that capture took")
        self._pool_bytes = gauge("graph_pool_bytes", "Bytes of static buffers and graph memory")
        self._nonfinite = counter("nonfinite", "Embeddings withheld for not being finite")
        self._heartbeat = gauge("engine_heartbeat_timestamp_seconds", "When the engine's thread last came by")
        self._model = gauge(
            "model_info", "What is served", "model", "model_type", "dtype", "device", "graphs", "attention"
        )
        self._touch()

    # -- Monitor ------------------------------------------------------------------------------

    def batch_ran(self, report: BatchReport) -> None:
        """Count a batch: its items by path, its tokens and padding, its stages."""
        padding = 0
        if report.budget:
            padding = report.budget.tokens - report.tokens
            self._replays.labels(str(report.budget.tokens)).inc()
            self._fill.observe(report.tokens / report.budget.tokens)
            self._graph_tokens.labels(str(report.budget.tokens), "real").inc(report.tokens)
            self._graph_tokens.labels(str(report.budget.tokens), "padding").inc(padding)
        self._tokens.labels("real").inc(report.tokens)
        self._tokens.labels("padding").inc(padding)
        self._batch_items.observe(len(report.items))
        self._batch_requests.observe(report.requests)
        if report.timings:
            for stage in ("stage_in", "execute", "stage_out"):
                self._stages.labels(stage).observe(getattr(report.timings, stage))
        for modality, outcome in report.items:
            self._count_item(modality, report.budget, report.fallback)
            self._nonfinite.inc(isinstance(outcome, NonFinite))

    def item_waited(self, seconds: float) -> None:
        """An item left the queue for the device."""
        self._stages.labels("queue").observe(seconds)

    def item_dropped(self, stage: str, reason: str) -> None:
        """An item was cancelled, or its deadline passed while it waited."""
        if reason == "deadline":
            self._expired.labels(stage).inc()
        else:
            self._cancelled.labels(stage).inc()

    def queue_changed(self, items: int, nbytes: int) -> None:
        """The queue now holds so much."""
        self._queue_items.set(items)
        self._queue_bytes.set(nbytes)

    def heartbeat(self) -> None:
        """The engine's thread came by."""
        self._heartbeat.set_to_current_time()

    def canary_ran(self, *, passed: bool) -> None:
        """The canary went through the engine."""
        self._canaries.labels("ok" if passed else "failed").inc()

    # -- the rest of the server ---------------------------------------------------------------

    def sent(self, seconds: float) -> None:
        """The rows of an item were written to the stream."""
        self._stages.labels("send").observe(seconds)

    def item_failed(self, code: str) -> None:
        """An item was answered with an error of its own."""
        self._items_failed.labels(code).inc()

    def received(self, nbytes: int) -> None:
        """A request message with items arrived."""
        self._received.inc(nbytes)

    def delivered(self, nbytes: int) -> None:
        """Rows were sent on a response stream."""
        self._delivered.labels("stream").inc(nbytes)

    def admits(self, items: int, nbytes: int) -> None:
        """Bounds on what may be admitted at once."""
        self._limit_items.set(items)
        self._limit_bytes.set(nbytes)

    def admitted_changed(self, items: int, nbytes: int) -> None:
        """Permits are now out for so much."""
        self._admitted_items.set(items)
        self._admitted_bytes.set(nbytes)

    def cache_hit(self, modality: Modality) -> None:
        """An item was answered from the cache."""
        self._cache_hits.inc()
        self._items.labels(modality, Path.CACHE).inc()

    def cache_missed(self) -> None:
        """An item was looked for in vain."""
        self._cache_misses.inc()

    def cache_changed(self, nbytes: int, evicted: int) -> None:
        """The cache now holds so much, `evicted` embeddings fewer."""
        self._cache_bytes.set(nbytes)
        self._cache_evictions.inc(evicted)

    def graphs_captured(self, budgets: Iterable[Budget], dropped: int, seconds: float, nbytes: int) -> None:
        """Capture is done; budgets show in the exposition before their first hit."""
        captured = list(budgets)
        self._dropped.set(dropped)
        self._captured.set(len(captured))
        self._capture_seconds.set(seconds)
        self._pool_bytes.set(nbytes)
        for budget in captured:
            self._replays.labels(str(budget.tokens))

    def model_loaded(self, **labels: str) -> None:
        """What is served, as labels of an info metric."""
        self._model.labels(**labels).set(1)

    def _count_item(self, modality: Modality, budget: Budget | None, fallback: Fallback | None) -> None:
        if budget:
            self._hits.labels(modality, str(budget.tokens)).inc()
        else:
            assert fallback is not None
            self._fallbacks.labels(modality, fallback).inc()
        self._items.labels(modality, Path.GRAPH if budget else Path.EAGER).inc()

    def _touch(self) -> None:
        """Closed label sets show from the start, so that rates have a zero to rise from."""
        for modality in Modality:
            for path in Path:
                self._items.labels(modality, path)
            for reason in Fallback:
                self._fallbacks.labels(modality, reason)
        for kind in ("real", "padding"):
            self._tokens.labels(kind)
        for code in ITEM_CODES:
            self._items_failed.labels(code)
        self._delivered.labels("stream")
        for bound in ("items", "bytes", "bodies", "uploads"):
            self.rejected.labels(bound)
        for stage in ("queue", "encoded", "send"):
            self._cancelled.labels(stage)
        for stage in ("admission", "queue"):
            self._expired.labels(stage)
        for result in ("ok", "failed"):
            self._canaries.labels(result)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"vitwire_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"vitwire_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(f"vitwire_{name}", text, labels, registry=self.registry, buckets=tuple(buckets))
