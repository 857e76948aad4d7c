"""Metrics that `rpc/` records, on the event loop."""

from collections.abc import Mapping

from vitwire_server.core.decoding import Fault
from vitwire_server.core.items import Modality
from vitwire_server.core.models import NotOnDevice, Place
from vitwire_server.observe.metrics.series import SECONDS, Series, Shared

ITEM_CODES = (
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "INTERNAL",
)
"""Names of gRPC's codes that an item may fail with."""


class RpcMetrics:
    """Requests, responses and their bytes."""

    def __init__(self, series: Series, shared: Shared) -> None:
        self.requests = series.counter("requests", "RPCs by method and status code", "method", "code")
        self.request_seconds = series.histogram("request_seconds", "Duration of an RPC", SECONDS, "method")
        self.inflight = series.gauge("inflight_requests", "RPCs with items in flight")
        self.rejected = series.counter("rejected", "Requests rejected, by the limit that was reached", "reason")
        self._items_failed = series.counter("items_failed", "Items answered with an error", "code")
        self._received = series.counter("received_bytes", "Bytes of request messages that carry items")
        # Looking up a label takes four times as long as counting.
        self._delivered = shared.delivered.labels("stream")
        self._delivery_seconds = shared.delivery_seconds.labels("stream")
        self._sending, self._cancelled = shared.stages.labels("send"), shared.cancelled.labels("send")
        for code in ITEM_CODES:
            self._items_failed.labels(code)
        for limit in ("items", "bytes", "bodies", "uploads"):
            self.rejected.labels(limit)
        self._decode_seconds = series.histogram(
            "decode_seconds", "Time to decode and prepare an encoded item, its wait for a decoder included", SECONDS,
            "modality",
        )  # fmt: skip
        self._decode_failures = series.counter("decode_failures", "Encoded items that were not decoded", "reason")
        self._decoders = series.gauge("decode_processes", "Decoder processes that run")
        self._busy = series.gauge("decode_busy", "Decoder processes that have a job")
        self._expiry = series.least(
            "tls_certificate_expiry_timestamp_seconds",
            "Time at which the certificate that new connections get expires; 0 without TLS",
        )
        self._decode_waiting = series.gauge("decode_waiting", "Encoded items that wait for a decoder")
        self._prepared = series.counter(
            "prepared", "Pictures and files prepared, by where, and why not on the device", "where", "reason"
        )
        self._prepare_seconds = shared.prepare_seconds
        for modality in Modality:
            self._decode_seconds.labels(modality)
        for reason in Fault:
            self._decode_failures.labels(reason)

    def certificate_loaded(self, expiry: float) -> None:
        """New connections get a certificate that expires at this Unix time."""
        self._expiry.set(expiry)

    def received(self, nbytes: int) -> None:
        """A request message with items arrived."""
        self._received.inc(nbytes)

    def item_failed(self, code: str) -> None:
        """An item was answered with an error."""
        self._items_failed.labels(code).inc()

    def decoded(self, modality: Modality, seconds: float) -> None:
        """An encoded item was decoded and prepared, so long after its bytes had arrived."""
        self._decode_seconds.labels(modality).observe(seconds)

    def prepared(self, reason: NotOnDevice | None) -> None:
        """A picture or file was prepared, or sent to the device without a reason."""
        self._prepared.labels(Place.CPU if reason else Place.DEVICE, reason or "").inc()

    def prepare_took(self, where: Place, stages: Mapping[str, float]) -> None:
        """Seconds of each stage in a decoder, which is on the device or not."""
        for stage, seconds in stages.items():
            self._prepare_seconds.labels(where, stage).observe(seconds)

    def decode_failed(self, reason: Fault) -> None:
        """An encoded item was not decoded."""
        self._decode_failures.labels(reason).inc()

    def decoders(self, count: int, busy: int) -> None:
        """So many decoders of this process run, and so many of them have a job."""
        self._decoders.set(count)
        self._busy.set(busy)

    def waiting(self, count: int) -> None:
        """So many encoded items wait for a decoder of this process."""
        self._decode_waiting.set(count)

    def sent(self, seconds: float) -> None:
        """The rows of an item were written to the stream, in so many seconds."""
        self._sending.observe(seconds)
        self._delivery_seconds.observe(seconds)

    def send_cancelled(self) -> None:
        """An encoded item was not sent, as its RPC was cancelled."""
        self._cancelled.inc()

    def delivered(self, nbytes: int) -> None:
        """Rows were sent on a response stream."""
        self._delivered.inc(nbytes)
