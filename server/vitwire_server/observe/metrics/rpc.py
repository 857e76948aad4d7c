"""Metrics that `rpc/` records, on the event loop."""

from collections.abc import Mapping

from vitwire_children.serving import Fault
from vitwire_server.core.items import Modality
from vitwire_server.core.models import NotOnDevice, Place
from vitwire_server.observe.metrics.series import SECONDS, Series

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
    """Requests, responses and their bytes. Attributes that are not metrics record what they are called with."""

    def __init__(self, series: Series) -> None:
        counter, gauge, histogram = series.counter, series.gauge, series.histogram
        self.requests = counter("requests", "RPCs by method and status code", method=(), code=())
        self.request_seconds = histogram("request_seconds", "Duration of an RPC", SECONDS, method=())
        self.inflight = gauge("inflight_requests", "RPCs with items in flight")
        reasons = ("items", "bytes", "bodies", "uploads")
        self.rejected = counter("rejected", "Requests rejected, by the limit that was reached", reason=reasons)
        self._items_failed = counter("items_failed", "Items answered with an error", code=ITEM_CODES)
        self.received = counter("received_bytes", "Bytes of request messages that carry items").inc
        # Looking up a label takes four times as long as counting.
        self.delivered = series.delivered.labels("stream").inc
        self._delivery_seconds = series.delivery_seconds.labels("stream")
        self._sending = series.stages.labels("send")
        self.send_cancelled = series.cancelled.labels("send").inc
        self._decode_seconds = histogram(
            "decode_seconds", "Time to decode and prepare a file or picture, with its wait for a decoder", SECONDS,
            modality=Modality,
        )  # fmt: skip
        self._decode_failures = counter("decode_failures", "Files and pictures that were not decoded", reason=Fault)
        self._decoders = gauge("decode_processes", "Decoder processes that run")
        self._busy = gauge("decode_busy", "Decoder processes that have a job")
        self.waiting = gauge("decode_waiting", "Files and pictures that wait for a decoder").set
        self.certificate_loaded = series.least(
            "tls_certificate_expiry_timestamp_seconds",
            "Time at which the certificate that new connections get expires; 0 without TLS",
        ).set
        self._prepared = counter(
            "prepared",
            "Pictures and files prepared, by place, and the reason if not on the device",
            where=Place,
            reason=(),
        )
        self._prepare_seconds = series.prepare_seconds

    def item_failed(self, code: str) -> None:
        self._items_failed.labels(code).inc()

    def decoded(self, modality: Modality, seconds: float) -> None:
        """An encoded item was decoded and prepared, this long after its bytes had arrived."""
        self._decode_seconds.labels(modality).observe(seconds)

    def prepared(self, reason: NotOnDevice | None) -> None:
        """A picture or file was prepared, or sent to the device without a reason."""
        self._prepared.labels(Place.CPU if reason else Place.DEVICE, reason or "").inc()

    def prepare_took(self, where: Place, stages: Mapping[str, float]) -> None:
        """Seconds of each stage in a decoder, which is on the device or not."""
        for stage, seconds in stages.items():
            self._prepare_seconds.labels(where, stage).observe(seconds)

    def decode_failed(self, reason: Fault) -> None:
        self._decode_failures.labels(reason).inc()

    def decoders(self, count: int, busy: int) -> None:
        """In this process `count` decoders run, and `busy` of them have a job."""
        self._decoders.set(count)
        self._busy.set(busy)

    def sent(self, seconds: float) -> None:
        """The rows of an item were written to the stream in this time."""
        self._sending.observe(seconds)
        self._delivery_seconds.observe(seconds)
