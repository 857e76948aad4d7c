"""Metrics that the engine's process records: `scheduling/` on the engine thread, the queue on any thread."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache

from vitwire_server.core.budgets import Budget
from vitwire_server.core.errors import NonFinite
from vitwire_server.core.items import Modality
from vitwire_server.core.models import ModelCard, Place
from vitwire_server.core.plans import Fallback
from vitwire_server.core.reports import BatchReport, Encoded, Path, Refit, Waiting
from vitwire_server.observe.metrics.series import Series

_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128)
_RATIOS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)
_MEMORY_SECONDS = 5.0


class MemoryMetrics:
    """Use of the device's memory, read on the engine thread: the driver may block for as long as the device hangs.

    On a CPU, whose memory is not the device's alone, there are no series.
    """

    def __init__(self, series: Series) -> None:
        self._bytes = series.gauge("device_memory_bytes", "Memory of the CUDA device, by kind", kind=())
        self._read: Callable[[], Mapping[str, int]] = dict
        self._due = 0.0

    def reads(self, read: Callable[[], Mapping[str, int]]) -> None:
        """From now on `read` returns the bytes of each kind; it may raise RuntimeError, as for a lost device."""
        self._read = read

    def refresh(self) -> None:
        """Read it if that is due; called on the engine thread between batches."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + _MEMORY_SECONDS
        with suppress(RuntimeError):
            for kind, nbytes in self._read().items():
                self._bytes.labels(kind).set(nbytes)


class EngineMetrics:
    """The queue, batches, budgets and the engine's health; implements core's `Monitor`."""

    def __init__(self, series: Series, memory: MemoryMetrics) -> None:
        self._memory = memory
        counter, gauge, histogram = series.counter, series.gauge, series.histogram
        self._queue = (
            gauge("queue_items", "Items waiting in the queue"),
            gauge("queue_bytes", "Bytes of pixels waiting in the queue"),
            gauge("queue_tokens", "Tokens of the items waiting in the queue"),
            gauge("queue_seconds", "Predicted time to encode the waiting items"),
        )
        self._expired = counter(
            "expired", "Items whose deadline passed, or could not be met, by stage", stage=("admission", "queue")
        )
        # Looking up a label takes as long as counting, and items of a batch wait for it.
        self._hits = cache(counter("graph_hits", "Items encoded by a graph replay", modality=(), budget=()).labels)
        self._replays = cache(counter("graph_replays", "Graph replays", budget=()).labels)
        fallbacks = counter("eager_fallbacks", "Items encoded eagerly, and why", modality=Modality, reason=Fallback)
        self._fallbacks = cache(fallbacks.labels)
        text = "Tokens computed by graph replays, real and padding"
        self._graph_tokens = cache(counter("graph_tokens", text, budget=(), kind=()).labels)
        tokens = counter("tokens", "Tokens computed, real and padding", kind=("real", "padding"))
        self._real, self._padding = tokens.labels("real"), tokens.labels("padding")
        self._nonfinite = counter("nonfinite", "Embeddings withheld because they have NaN or infinite values")
        self._batch_items = histogram("batch_items", "Items per batch", _ITEMS)
        self._batch_requests = histogram("batch_requests", "Requests per batch", _ITEMS)
        self._fill = histogram("batch_fill_ratio", "Real tokens of a graph replay divided by its budget", _RATIOS)
        self._canaries = counter("canaries", "Test items run while the engine is idle", result=("ok", "failed"))
        self._heartbeat = gauge("engine_heartbeat_timestamp_seconds", "Time of the engine thread's last heartbeat")
        self._items, self._cancelled = cache(series.items.labels), series.cancelled
        self._stages = {stage: series.stages.labels(stage).observe for stage in ("stage_in", "execute", "stage_out")}
        self.item_waited = series.stages.labels("queue").observe
        self._prepare = series.prepare_seconds.labels(Place.DEVICE, "batch")
        self._copied = series.copied.labels("host")

    def batch_ran(self, report: BatchReport) -> None:
        """Count a batch: its items by path, its tokens and padding, its stages."""
        padding = 0
        if report.budget:
            size = str(report.budget.tokens)
            padding = report.budget.tokens - report.tokens
            self._replays(size).inc()
            self._fill.observe(report.tokens / report.budget.tokens)
            self._graph_tokens(size, "real").inc(report.tokens)
            self._graph_tokens(size, "padding").inc(padding)
        self._real.inc(report.tokens)
        self._padding.inc(padding)
        self._batch_items.observe(len(report.items))
        self._batch_requests.observe(report.requests)
        if report.timings:
            for stage, observe in self._stages.items():
                observe(getattr(report.timings, stage))
            if report.timings.prepare:
                self._prepare.observe(report.timings.prepare)
        for modality, count in Counter(modality for modality, _ in report.items).items():
            if report.budget:
                self._hits(modality, size).inc(count)
            else:
                self._fallbacks(modality, report.fallback).inc(count)
            self._items(modality, Path.GRAPH if report.budget else Path.EAGER).inc(count)
        self._nonfinite.inc(sum(isinstance(outcome, NonFinite) for _, outcome in report.items))
        self._copied.inc(sum(len(each.embedding.data) for _, each in report.items if isinstance(each, Encoded)))

    def item_dropped(self, stage: str, reason: str) -> None:
        """An item was cancelled, or its deadline passed, before it was encoded."""
        dropped = self._expired if reason == "deadline" else self._cancelled
        dropped.labels(stage).inc()

    def watch_queue(self, waiting: Callable[[], Waiting]) -> None:
        """Ask what waits whenever a page is read: the queue changes far more often."""

        def figure(position: int) -> Callable[[], float]:
            return lambda: waiting()[position]

        for position, shown in enumerate(self._queue):
            shown.set_function(figure(position))

    def heartbeat(self) -> None:
        """The engine thread made progress."""
        self._heartbeat.set_to_current_time()
        self._memory.refresh()

    def canary_ran(self, *, passed: bool) -> None:
        """A test item went through the engine."""
        self._canaries.labels("ok" if passed else "failed").inc()


class LadderMetrics:
    """Budgets in use, fits, and the pause of the last change; implements core's `LadderMonitor`.

    Recorded on the engine thread.
    """

    def __init__(self, series: Series) -> None:
        self._refits = series.counter("ladder_refits", "Fits of the ladder to recent loads, by result", result=Refit)
        self._captured = series.gauge("graphs_captured", "Budgets whose graph was captured and is in use")
        self._budgets = series.gauge(
            "ladder_budgets", "1 for budgets in use, 0 for those that were replaced", budget=()
        )
        self._pause = series.gauge("ladder_pause_seconds", "Longest time that batches waited during the last change")
        self._shown: set[str] = set()

    def in_use(self, ladder: Iterable[Budget]) -> None:
        """These budgets are in use, and no others."""
        budgets = set(ladder)
        sizes = {str(budget.tokens) for budget in budgets}
        self._shown |= sizes
        self._captured.set(len(budgets))
        for size in self._shown:
            self._budgets.labels(size).set(size in sizes)

    def refitted(self, result: Refit) -> None:
        """A fit came to this."""
        self._refits.labels(result).inc()

    def changed(self, ladder: Iterable[Budget], pause: float) -> None:
        """Another ladder is in use, after batches waited for `pause` seconds at most."""
        self.in_use(ladder)
        self._pause.set(pause)


class ModelMetrics:
    """The loaded model and the capture of its graphs, recorded once while it loads."""

    def __init__(self, series: Series) -> None:
        self._model = series.gauge(
            "model_info", "The model being served; always 1",
            model=(), model_type=(), dtype=(), device=(), graphs=(), attention=(), pooling=(), version=(),
        )  # fmt: skip
        self._weights = series.gauge(
            "weights_info", "Fingerprint of the weights being served; always 1", fingerprint=()
        )
        self._preparation = series.gauge(
            "preparation_info",
            "Where pictures are prepared, and JPEG files and clips decoded, and why not on the device; always 1",
            what=(), where=(), reason=(),
        )  # fmt: skip
        self._dropped = series.gauge("graphs_dropped", "Budgets whose capture failed")
        self._attention = series.gauge(
            "budget_info", "The attention backend of a captured budget, and its longest segment; always 1",
            budget=(), segment_patches=(), attention=(),
        )  # fmt: skip
        self._capture_seconds = series.gauge("graph_capture_seconds", "Time it took to capture all graphs")
        self._pool_bytes = series.gauge("graph_pool_bytes", "Bytes of static buffers and graph memory")

    def loaded(self, fingerprint: str, **labels: str) -> None:
        """Set the labels of the info metrics."""
        self._weights.labels(fingerprint).set(1)
        self._model.labels(**labels).set(1)

    def described(self, card: ModelCard) -> None:
        """Where pictures are prepared, and JPEG files and clips decoded, if they are."""
        if card.prepared:
            for what, found in (
                ("prepare", card.preparation),
                ("decode", card.decoding),
                ("decode_clips", card.clip_decoding),
            ):
                self._preparation.labels(what, found.place, found.reason or "").set(1)

    def captured(self, dropped: int, seconds: float, nbytes: int) -> None:
        self._dropped.set(dropped)
        self._capture_seconds.set(seconds)
        self._pool_bytes.set(nbytes)

    def attends(self, backends: Mapping[Budget, str]) -> None:
        """The budgets that are used, and the attention backend of each."""
        self._attention.clear()
        for budget, backend in backends.items():
            self._attention.labels(str(budget.tokens), str(budget.max_segment_patches), backend).set(1)
