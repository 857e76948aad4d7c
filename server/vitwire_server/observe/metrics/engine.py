"""Metrics that `scheduling/` records: batches on the engine thread, the queue on any thread."""

from vitwire_server.core.budgets import Budget
from vitwire_server.core.errors import NonFinite
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Place
from vitwire_server.core.plans import Fallback
from vitwire_server.core.reports import BatchReport, Encoded, Path
from vitwire_server.observe.metrics.memory import MemoryMetrics
from vitwire_server.observe.metrics.series import Series, Shared

_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128)
_RATIOS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)


class EngineMetrics:
    """The queue, batches, budgets and the engine's health; implements core's `Monitor`."""

    def __init__(self, series: Series, shared: Shared, memory: MemoryMetrics) -> None:
        self._memory = memory
        counter, gauge, histogram = series.counter, series.gauge, series.histogram
        self._queue_items = gauge("queue_items", "Items waiting in the queue")
        self._queue_bytes = gauge("queue_bytes", "Bytes of pixels waiting in the queue")
        self._queue_tokens = gauge("queue_tokens", "Tokens of the items waiting in the queue")
        self._queue_seconds = gauge("queue_seconds", "Predicted time to encode what waits in the queue")
        self._expired = counter("expired", "Items whose deadline passed, or could not be met, by stage", "stage")
        self._hits = counter("graph_hits", "Items encoded by a graph replay", "modality", "budget")
        self._replays = counter("graph_replays", "Graph replays", "budget")
        self._fallbacks = counter("eager_fallbacks", "Items encoded eagerly, and why", "modality", "reason")
        self._graph_tokens = counter(
            "graph_tokens", "Tokens computed by graph replays, real and padding", "budget", "kind"
        )
        self._tokens = counter("tokens", "Tokens computed, real and padding", "kind")
        self._nonfinite = counter("nonfinite", "Embeddings withheld for not being finite")
        self._batch_items = histogram("batch_items", "Items per batch", _ITEMS)
        self._batch_requests = histogram("batch_requests", "Requests per batch", _ITEMS)
        self._fill = histogram("batch_fill_ratio", "Real tokens of a graph replay divided by its budget", _RATIOS)
        self._canaries = counter("canaries", "Test items run while the engine is idle", "result")
        self._heartbeat = gauge("engine_heartbeat_timestamp_seconds", "Time of the engine thread's last heartbeat")
        self._items, self._stages, self._cancelled = shared.items, shared.stages, shared.cancelled
        self._prepare = shared.prepare_seconds.labels(Place.DEVICE, "batch")
        self._copied = shared.copied.labels("host")
        self._show_labels()

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
            if report.timings.prepare:
                self._prepare.observe(report.timings.prepare)
        for modality, outcome in report.items:
            self._count_item(modality, report.budget, report.fallback)
            self._nonfinite.inc(isinstance(outcome, NonFinite))
        self._copied.inc(sum(len(each.embedding.data) for _, each in report.items if isinstance(each, Encoded)))

    def item_waited(self, seconds: float) -> None:
        """An item left the queue for the device."""
        self._stages.labels("queue").observe(seconds)

    def item_dropped(self, stage: str, reason: str) -> None:
        """An item was cancelled, or its deadline passed, before it was encoded."""
        if reason == "deadline":
            self._expired.labels(stage).inc()
        else:
            self._cancelled.labels(stage).inc()

    def queue_changed(self, items: int, nbytes: int, tokens: int, seconds: float) -> None:
        """Set what the queue holds now, and the seconds that it is predicted to take."""
        self._queue_items.set(items)
        self._queue_bytes.set(nbytes)
        self._queue_tokens.set(tokens)
        self._queue_seconds.set(seconds)

    def heartbeat(self) -> None:
        """The engine thread made progress."""
        self._heartbeat.set_to_current_time()
        self._memory.refresh()

    def canary_ran(self, *, passed: bool) -> None:
        """A test item went through the engine."""
        self._canaries.labels("ok" if passed else "failed").inc()

    def _count_item(self, modality: Modality, budget: Budget | None, fallback: Fallback | None) -> None:
        if budget:
            self._hits.labels(modality, str(budget.tokens)).inc()
        else:
            assert fallback is not None
            self._fallbacks.labels(modality, fallback).inc()
        self._items.labels(modality, Path.GRAPH if budget else Path.EAGER).inc()

    def _show_labels(self) -> None:
        """Show closed label sets from the start, so that rates begin at zero."""
        for modality in Modality:
            for reason in Fallback:
                self._fallbacks.labels(modality, reason)
        for kind in ("real", "padding"):
            self._tokens.labels(kind)
        for stage in ("queue", "encoded"):
            self._cancelled.labels(stage)
        for stage in ("admission", "queue"):
            self._expired.labels(stage)
        for result in ("ok", "failed"):
            self._canaries.labels(result)
