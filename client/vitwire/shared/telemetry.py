"""Spans and metrics sent to an OpenTelemetry collector over OTLP. Needs the extra `otlp`.

Everything is sent by threads in the background. The SDK's `OTEL_` variables apply.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Any
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry

from vitwire.shared.otlp_metrics import Translator

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 3.0
_INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
_INTERVAL_MILLISECONDS = 60_000.0


class _Failures(logging.Filter):
    """Lets each failure to export be logged once, until an export of the signal succeeds."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Called for each line of the SDK's exporters."""
        if not (record.msg.startswith("Failed to export") and isinstance(record.args, tuple)):
            return True
        signal, _, code, *_ = map(str, record.args)
        is_new = (signal, code) not in self._seen
        self._seen.add((signal, code))
        return is_new

    def succeeded(self, signal: str) -> None:
        """The collector took spans or metrics."""
        self._seen = {each for each in self._seen if each[0] != signal}


_FAILURES = _Failures()


class _SpanExporter(OTLPSpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            _FAILURES.succeeded(self._exporting)
        return result


class _MetricExporter(OTLPMetricExporter):
    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:  # noqa: ANN401  # as the base
        result = super().export(metrics_data, timeout_millis, **kwargs)
        if result is MetricExportResult.SUCCESS:
            _FAILURES.succeeded(self._exporting)
        return result


def sends(signal: str) -> bool:
    """True unless `OTEL_TRACES_EXPORTER`, `OTEL_METRICS_EXPORTER` or `OTEL_SDK_DISABLED` says otherwise.

    signal: `traces` or `metrics`.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower() != "none"


def tracer_provider(endpoint: str, service: str, version: str) -> TracerProvider:
    """Makes tracers whose spans go to the collector at host:port, or https://host:port for TLS.

    The collector need not be reachable yet. `service` is the name of this process without OTEL_SERVICE_NAME.
    """
    provider = TracerProvider(resource=_resource(service, version), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_SpanExporter(endpoint, insecure=_is_insecure(endpoint))))
    _log_less()
    return provider


class SpanClock:
    """Times of one request's spans, in nanoseconds since the epoch.

    They stay in order if the system's clock is set meanwhile.
    """

    def __init__(self) -> None:
        self._epoch = time.time_ns() - time.monotonic_ns()

    def now(self) -> int:
        """The time now."""
        return self._epoch + time.monotonic_ns()

    def at(self, seconds: float) -> int:
        """The time at some seconds of the monotonic clock."""
        return self._epoch + round(seconds * 1e9)


class MetricsSender:
    """Sends the metrics of a registry to a collector at intervals, and once more when it is closed."""

    def __init__(self, endpoint: str, service: str, version: str, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._translator = Translator()
        self._resource = _resource(service, version)
        self._scope = InstrumentationScope("vitwire", version)
        self._exporter = _MetricExporter(endpoint, insecure=_is_insecure(endpoint))
        self._interval = _interval()
        self._ending = Event()
        self._thread = Thread(target=self._run, name="otlp-metrics", daemon=True)
        _log_less()
        self._thread.start()

    def shutdown(self) -> None:
        """Send the last values."""
        self._ending.set()
        self._thread.join()
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._ending.wait(self._interval):
            self._send()
        self._send()

    def _send(self) -> None:
        try:
            metrics = self._translator.metrics(self._registry.collect())
            scope = ScopeMetrics(self._scope, metrics, "")
            self._exporter.export(MetricsData([ResourceMetrics(self._resource, [scope], "")]))
        except Exception:  # noqa: BLE001  # this thread ends for no error; the next interval may succeed
            _log.exception("metrics were not sent")


def in_time(*shutdowns: Callable[[], object]) -> None:
    """Shut down exporters. A process that ends waits no longer than 3 s for them."""
    closing = [Thread(target=each, name="otlp-close", daemon=True) for each in shutdowns]
    for thread in closing:
        thread.start()
    until = time.monotonic() + _CLOSE_SECONDS
    for thread in closing:
        thread.join(max(0.0, until - time.monotonic()))


def _resource(service: str, version: str) -> Resource:
    """This process, with a unique id, so that metrics of several do not mix. Variables of the SDK take precedence."""
    ours = {"service.name": service, "service.version": version, "service.instance.id": str(uuid4())}
    return Resource.create(ours).merge(OTELResourceDetector().detect())


def _is_insecure(endpoint: str) -> bool:
    return not endpoint.startswith("https://")


def _interval() -> float:
    """Seconds between exports of metrics."""
    text = os.environ.get(_INTERVAL, "")
    try:
        milliseconds = float(text) if text else _INTERVAL_MILLISECONDS
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds < 1e12:
        _log.warning("ignored: %s=%s: expected milliseconds above 0", _INTERVAL, text)
        milliseconds = _INTERVAL_MILLISECONDS
    return milliseconds / 1000


def _log_less() -> None:
    """A collector that is away is no news after the first time: neither are retries, nor spans that are dropped."""
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").addFilter(_FAILURES)
