"""An OTLP collector in the test process, over real gRPC."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

_ARRIVAL_SECONDS = 30
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
"""Variables of a process that sends its spans soon."""


class Collector(TraceServiceServicer):
    """Keeps all spans and the attributes of their resources."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []

    def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:  # noqa: N802 - the contract's name
        for batch in request.resource_spans:
            self.resources.append({each.key: each.value.string_value for each in batch.resource.attributes})
            for scope in batch.scope_spans:
                self.spans += scope.spans
        return ExportTraceServiceResponse()

    def wait_for(self, wanted: Callable[[Span], bool], count: int = 1) -> list[Span]:
        """Wait until `count` wanted spans have arrived; returns them."""
        deadline = time.monotonic() + _ARRIVAL_SECONDS
        while len(found := [span for span in self.spans if wanted(span)]) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} spans arrived"
            time.sleep(0.05)
        return found


def attributes(span: Span) -> dict[str, str | int]:
    """The attributes of a span that are strings or integers."""
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free loopback port."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]  # generated
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
