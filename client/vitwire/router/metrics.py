"""Metrics of the router. Label values come from closed sets."""

from http import HTTPStatus

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600)
_CODES = frozenset(str(status.value) for status in HTTPStatus)


class Metrics:
    """All metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "vitwire_router_requests", "requests, by route and status", ["route", "code"], registry=self.registry
        )
        self.seconds = Histogram(
            "vitwire_router_stage_seconds",
            "time of a request in each stage",
            ["stage"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.images = Counter(
            "vitwire_router_images",
            "images of requests, by source and result",
            ["source", "result"],
            registry=self.registry,
        )
        self.inflight = Gauge("vitwire_router_inflight_requests", "requests in flight", registry=self.registry)
        self.buffered = Gauge("vitwire_router_buffered_bytes", "bytes of bodies held", registry=self.registry)
        self.rejected = Counter(
            "vitwire_router_rejected", "requests refused by a limit of the router", ["reason"], registry=self.registry
        )
        self.cancelled = Counter(
            "vitwire_router_cancelled", "requests whose client went away, by stage", ["stage"], registry=self.registry
        )
        self.failures = Counter(
            "vitwire_router_failures", "errors of encoder and engine", ["upstream", "code"], registry=self.registry
        )

    def answered(self, route: str, status: int) -> None:
        """Count a request by its status; statuses that HTTP does not define count as `other`."""
        code = str(status)
        self.requests.labels(route, code if code in _CODES else "other").inc()

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)
