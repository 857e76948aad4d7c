"""Metrics of the router. Label values come from closed sets."""

from functools import partial
from http import HTTPStatus
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600)
FALLBACKS = ("unavailable", "overloaded", "timeout", "failed")
"""Reasons; as codes of errors they begin with `encoder_`."""
_CODES = frozenset(str(status.value) for status in HTTPStatus) | {"0"}


class Metrics:
    """All metrics, in a new registry. Counters begin at 0, so that the first event counts in a rate."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        self.requests = counter(
            "vitwire_router_requests",
            "requests by route (chat, embeddings, proxied) and status, 0 if the caller left",
            ["route", "code"],
        )
        self.seconds = Histogram(
            "vitwire_router_stage_seconds",
            "seconds of a request by stage: receive, images, engine (until its first byte)",
            ["stage"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        meaning, labels = "by source (data, url) and result (loaded, refused)", ["source", "result"]
        self.images = counter("vitwire_router_images", f"images {meaning}", labels)
        self.clips = counter("vitwire_router_clips", f"clips {meaning}", labels)
        for values in product(("data", "url"), ("loaded", "refused")):
            self.images.labels(*values)
            self.clips.labels(*values)
        self.inflight = gauge("vitwire_router_inflight_requests", "requests in flight")
        self.buffered = gauge("vitwire_router_buffered_bytes", "bytes of requests and images held")
        self.rejected = counter("vitwire_router_rejected", "requests refused at a limit: requests, bytes", ["reason"])
        for reason in ("requests", "bytes"):
            self.rejected.labels(reason)
        self.cancelled = counter(
            "vitwire_router_cancelled", "requests whose caller left or stopped reading, by stage", ["stage"]
        )
        for stage in ("receive", "images", "engine", "response"):
            self.cancelled.labels(stage)
        self.failures = counter(
            "vitwire_router_failures", "errors by upstream (encoder, engine) and code", ["upstream", "code"]
        )
        self.fallbacks = counter(
            "vitwire_router_fallbacks",
            "requests whose images were left to the engine, by reason: " + ", ".join(FALLBACKS),
            ["reason"],
        )
        for reason in FALLBACKS:
            self.fallbacks.labels(reason)

    def answered(self, route: str, status: int) -> None:
        """Count a request by its status; statuses that HTTP does not define count as `other`."""
        code = str(status)
        self.requests.labels(route, code if code in _CODES else "other").inc()

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)
