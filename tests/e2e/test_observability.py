"""What an operator can follow a request by: ids, traces, exemplars, and logs that stay short."""

import json
import re
from itertools import pairwise
from typing import Any
from urllib.request import Request, urlopen

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import trace
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from checkpoints import Checkpoints
from collectors import SOON, Collector, attributes, collecting
from encoded_files import photograph, saved
from entered import entered
from processes import edges
from routers import picture, router
from servers import ServerProcess, serving
from vitwire import Client, Item, NotCached
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub
from vitwire_server.observe.otlp import OtlpTracer

COLUMNS = 3 * 2 * 14 * 14
STAGES = ["queue", "stage_in", "execute", "stage_out", "send"]
TRACE_ID, PARENT_ID = 0x1234567890ABCDEF1234567890ABCDEF, 0x1234567890ABCDEF
NOT_SAMPLED, SAMPLED = TraceFlags(0), TraceFlags(1)

BUDGETS = ("--graphs", "simulated", "--budgets", "16,64")
FLAGS = (*BUDGETS, "--log-format", "json", "--dtype", "float32", "--otlp-endpoint")

collector = entered(collecting)
server = entered(
    lambda checkpoints, collector: serving(checkpoints("qwen2_vl"), *FLAGS, collector.endpoint, variables=SOON)
)


def item(rows: int = 16) -> Item:
    return Item(np.random.default_rng().random((rows, COLUMNS), np.float32), (1, rows // 2, 2))


def refused(stub: EncoderServiceStub, **headers: str) -> grpc.RpcError:
    """The error of a request without items."""
    pairs = tuple((key.replace("_", "-"), value) for key, value in headers.items())
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Encode(pb.EncodeRequest(), metadata=pairs, timeout=20))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return error.value


def lines(server: ServerProcess) -> list[dict[str, Any]]:
    """The log so far."""
    return [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]


class TestRequestIds:
    def test_the_callers_id_is_in_trailers_and_log(self, server: ServerProcess, stub: EncoderServiceStub) -> None:
        trailers = dict(refused(stub, x_request_id="order-66/a").trailing_metadata())
        assert trailers["x-request-id"] == "order-66/a"
        assert "grpc-status-details-bin" in trailers
        server.wait_for("order-66/a")
        (line,) = (each for each in lines(server) if each.get("request_id") == "order-66/a")
        assert line["level"] == "warning"
        assert re.fullmatch(r"Encode from ipv4:127\.0\.0\.1:\d+: INVALID_ARGUMENT: items: .*", line["message"])
        assert re.fullmatch(r"[0-9a-f]{32}", line["trace_id"])

    @pytest.mark.parametrize("offered", ["", " ", "x" * 65, "a b", 'a"b', "-rf", "a{b}"])
    def test_an_id_that_is_not_sane_is_replaced(self, stub: EncoderServiceStub, offered: str) -> None:
        trailers = dict(refused(stub, x_request_id=offered).trailing_metadata())
        assert re.fullmatch(r"[0-9a-f]{32}", str(trailers["x-request-id"]))

    def test_answers_carry_it_too(self, stub: EncoderServiceStub) -> None:
        _, call = stub.GetModel.with_call(pb.GetModelRequest(), metadata=(("x-request-id", "fine"),), timeout=20)
        assert dict(call.trailing_metadata())["x-request-id"] == "fine"
        stream = stub.EncodeStream(iter([]), metadata=(("x-request-id", "empty"),), timeout=20)
        assert list(stream) == []
        assert dict(stream.trailing_metadata())["x-request-id"] == "empty"


def of(method: str, request_id: str) -> Any:
    return lambda span: span.name.endswith(f"/{method}") and attributes(span)["vitwire.request_id"] == request_id


def stages_of(spans: list[Span], number: int) -> dict[str, Span]:
    """The stages of an item by name."""
    own = [span for span in spans if attributes(span).get("vitwire.item") == number]
    found = {span.name: span for span in own if "/" not in span.name}
    assert len(found) == len(own), "each once"
    return found


class TestTraces:
    @pytest.mark.parametrize(("rows", "method"), [(16, "Encode"), (1024, "EncodeStream")])
    def test_the_stages_of_a_request_in_the_callers_trace(
        self, server: ServerProcess, collector: Collector, rows: int, method: str
    ) -> None:
        """The client passes on the span that it is called in, as W3C asks."""
        context = SpanContext(TRACE_ID + rows, PARENT_ID, is_remote=False, trace_flags=SAMPLED)
        with Client(server.target) as client, trace.use_span(NonRecordingSpan(context)):
            client.encode([item(rows), item(rows)])
        mine = (TRACE_ID + rows).to_bytes(16, "big")
        spans = collector.wait_for(lambda span: span.trace_id == mine, 2 + 2 * len(STAGES))
        (rpc,) = (span for span in spans if span.name == f"vitwire.v1.EncoderService/{method}")
        assert (rpc.parent_span_id, rpc.kind) == (PARENT_ID.to_bytes(8, "big"), Span.SPAN_KIND_SERVER)
        assert attributes(rpc)["rpc.response.status_code"] == "OK"
        for number in range(2):
            stages = [s for s in spans if s.name in STAGES and attributes(s)["vitwire.item"] == number]
            assert [stage.name for stage in stages] == STAGES
            assert {stage.parent_span_id for stage in stages} == {rpc.span_id}
            queue, stage_in, execute, stage_out, send = stages
            assert queue.end_time_unix_nano <= stage_in.start_time_unix_nano + 1000
            assert stage_in.end_time_unix_nano <= execute.start_time_unix_nano + 1000
            assert execute.end_time_unix_nano > execute.start_time_unix_nano
            assert stage_out.end_time_unix_nano <= send.end_time_unix_nano
            assert all(rpc.start_time_unix_nano - 10**6 <= each.start_time_unix_nano for each in stages)
            assert all(each.end_time_unix_nano <= rpc.end_time_unix_nano + 10**6 for each in stages)
            expected = (
                {"vitwire.path": "graph", "vitwire.budget_tokens": 16} if rows == 16 else {"vitwire.path": "eager"}
            )
            assert attributes(execute).items() >= (expected | {"vitwire.tokens": rows // 4}).items()

    @pytest.mark.parametrize("place", ["cpu", "device"])
    def test_the_preparation_of_files_and_pictures(
        self, checkpoints: Checkpoints, collector: Collector, place: str
    ) -> None:
        photo = photograph(70, 110)
        file = saved(photo, "PNG")
        context = SpanContext(TRACE_ID + len(place), PARENT_ID, is_remote=False, trace_flags=SAMPLED)
        flags = ("--prepare", place, "--decode-processes", "1", "--otlp-endpoint", collector.endpoint)
        with (
            serving(checkpoints("qwen2_vl"), "--dtype", "float32", *flags) as process,
            Client(process.target) as client,
            trace.use_span(NonRecordingSpan(context)),
        ):
            client.encode([Item(encoded=file), Item.from_image(photo)])
            assert process.stop() == 0, "it sends remaining spans"
        mine = (TRACE_ID + len(place)).to_bytes(16, "big")
        spans = [span for span in collector.spans if span.trace_id == mine]
        (rpc,) = (span for span in spans if span.name.endswith("/Encode"))
        assert sorted(stages_of(spans, 0)) == sorted(["measure", "wait", "decode", "prepare", *STAGES])
        by_decoder = ["wait", "decode"] if place == "cpu" else []
        assert sorted(stages_of(spans, 1)) == sorted([*by_decoder, "prepare", *STAGES])
        own = stages_of(spans, 0)
        known = {"vitwire.modality": "image", "vitwire.bytes": len(file), "vitwire.size": "110x70"}
        reason = {"vitwire.reason": "asked"} if place == "cpu" else {}
        assert attributes(own["measure"]) == {**known, "vitwire.item": 0}
        assert attributes(own["decode"]) == {**known, **reason, "vitwire.item": 0, "vitwire.where": "cpu"}
        for number in range(2):
            assert (
                attributes(stages_of(spans, number)["prepare"]).items() >= ({"vitwire.where": place} | reason).items()
            )
        order = ["measure", "wait", "decode"] + (["prepare"] if place == "cpu" else []) + ["queue"]
        for one, other in pairwise(own[name] for name in order):
            assert one.end_time_unix_nano <= other.start_time_unix_nano + 10**5, (one.name, other.name)
        if place == "device":
            assert own["execute"].start_time_unix_nano <= own["prepare"].start_time_unix_nano
            assert own["prepare"].end_time_unix_nano <= own["execute"].end_time_unix_nano
        assert {span.parent_span_id for span in own.values()} == {rpc.span_id}

    def test_an_error_is_told_and_only_the_servers_own_marks_the_span(
        self, stub: EncoderServiceStub, collector: Collector
    ) -> None:
        refused(stub, x_request_id="traced-error")
        (span,) = collector.wait_for(of("Encode", "traced-error"))
        assert attributes(span)["rpc.response.status_code"] == "INVALID_ARGUMENT"
        assert span.status.code == Status.STATUS_CODE_UNSET
        assert span.parent_span_id == b""

    def test_health_is_not_traced_nor_what_the_caller_does_not_sample(
        self, server: ServerProcess, stub: EncoderServiceStub, collector: Collector
    ) -> None:
        with grpc.insecure_channel(server.target) as channel:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        context = SpanContext(TRACE_ID - 1, PARENT_ID, is_remote=False, trace_flags=NOT_SAMPLED)
        with Client(server.target) as client, trace.use_span(NonRecordingSpan(context)):
            client.encode([item()])
        refused(stub, x_request_id="after-those")
        collector.wait_for(of("Encode", "after-those"))
        assert not [span for span in collector.spans if span.trace_id == (TRACE_ID - 1).to_bytes(16, "big")]
        assert not [span for span in collector.spans if "Health" in span.name]

    def test_the_resource_says_who_it_is(self, stub: EncoderServiceStub, collector: Collector) -> None:
        refused(stub, x_request_id="who")
        collector.wait_for(of("Encode", "who"))
        assert all(each["service.name"] == "vitwire-server" for each in collector.resources)
        assert all(each["service.version"] for each in collector.resources)


def test_a_router_passes_the_callers_span_on(server: ServerProcess, collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE_ID + 1:032x}-{PARENT_ID:016x}-01", "content-type": "application/json"}
    with router(server.target, None) as proxy:
        body = json.dumps({"input": picture(56, 56)}).encode()
        with urlopen(Request(f"{proxy.url}/v1/embeddings", body, headers), timeout=60) as answer:
            assert answer.status == 200
    mine = (TRACE_ID + 1).to_bytes(16, "big")
    (span,) = collector.wait_for(lambda each: each.trace_id == mine and each.name.endswith("/Encode"))
    assert int.from_bytes(span.parent_span_id, "big") == PARENT_ID


def test_an_endpoint_may_stand_without_its_scheme(collector: Collector) -> None:
    tracer = OtlpTracer(collector.endpoint.removeprefix("http://"))
    with tracer.rpc("a.B", "c", {}) as span:
        assert span
        span.end("INTERNAL")
    tracer.close()
    (found,) = collector.wait_for(lambda each: each.name == "a.B/c")
    assert found.status.code == Status.STATUS_CODE_ERROR, "the server's own fault"


def test_a_collector_that_is_away_disturbs_nobody(checkpoints: Checkpoints) -> None:
    with (
        serving(checkpoints("qwen2_vl"), "--otlp-endpoint", "127.0.0.1:9", "--dtype", "float32") as process,
        Client(process.target) as client,
    ):
        assert len(client.encode([item()])) == 1
        assert process.stop() == 0


def exemplars(server: ServerProcess, method: str) -> list[dict[str, str]]:
    """The exemplars of a method's histogram, as OpenMetrics has them."""
    asked = Request(
        f"http://127.0.0.1:{server.metrics_port}/metrics", headers={"Accept": "application/openmetrics-text"}
    )
    with urlopen(asked, timeout=10) as answer:
        text = answer.read().decode()
    (family,) = (each for each in text_string_to_metric_families(text) if each.name == "vitwire_request_seconds")
    samples = [each for each in family.samples if each.labels["method"] == method and each.exemplar]
    return [each.exemplar.labels for each in samples if each.exemplar]


def test_exemplars_lead_to_traces(server: ServerProcess, stub: EncoderServiceStub, collector: Collector) -> None:
    if edges(server):
        pytest.skip("edges record no exemplars, see docs/operations/tracing.md")
    refused(stub, x_request_id="exemplary")
    (span,) = collector.wait_for(of("Encode", "exemplary"))
    assert {"trace_id": span.trace_id.hex()} in exemplars(server, "Encode")
    assert "# {" not in server.page("/metrics")[1], "the classic format knows no exemplars"


@pytest.mark.parametrize("rows", [16, 1024], ids=["Encode", "EncodeStream"])
def test_bytes_and_failed_items_are_counted(server: ServerProcess, rows: int) -> None:
    names = ("vitwire_received_bytes_total", "vitwire_delivered_bytes_total", "vitwire_items_failed_total")
    before = [server.metric(name) for name in names]
    pixels = item(rows)
    with Client(server.target) as client:
        embedding = client.encode([pixels])[0].numpy()
        with pytest.raises(NotCached):
            client.encode([Item(None, pixels.grid, content_id="nobody sent it")])
    received, delivered, failed = (server.metric(name) - old for name, old in zip(names, before, strict=True))
    assert 0 < received - np.asarray(pixels.pixels).nbytes < 1000, "headers are small"
    assert (delivered, failed) == (embedding.nbytes, 1)
    assert server.metric("vitwire_items_failed_total", code="NOT_FOUND") >= 1
    assert server.metric("vitwire_delivered_bytes_total", way="stream") >= delivered


def test_the_process_and_the_limits_show(server: ServerProcess) -> None:
    assert server.metric("process_resident_memory_bytes") > 100e6
    assert 0 < server.metric("process_open_fds") < server.metric("process_max_fds")
    assert server.metric("process_cpu_seconds_total") > 0
    assert server.metric("vitwire_queue_limit_items") == 4096
    assert server.metric("vitwire_queue_limit_bytes") == 4 << 30


def test_a_flood_of_bad_requests_logs_few_lines(server: ServerProcess, stub: EncoderServiceStub) -> None:
    before = len(lines(server))
    for _ in range(300):
        refused(stub, x_request_id="flood")
    server.wait_for("more lines like this")
    assert len(lines(server)) - before <= 40, "ten lines and a count in ten seconds, however many requests"
