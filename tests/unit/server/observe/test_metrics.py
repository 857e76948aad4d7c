"""The accounting identity, and an exposition that Prometheus accepts."""

from itertools import pairwise
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from readings import Readings
from vitwire_server.core.budgets import budget
from vitwire_server.core.errors import EncodeFailed, NonFinite
from vitwire_server.core.health import Health, State
from vitwire_server.core.items import DType, Embedding, Modality
from vitwire_server.core.plans import Fallback
from vitwire_server.core.reports import BatchReport, Encoded, ItemReport, Outcome, Path
from vitwire_server.core.runner import Timings
from vitwire_server.observe.metrics import Metrics
from vitwire_server.rpc.status import _CODES

NAMES = """
    requests_total items_total graph_hits_total graph_replays_total eager_fallbacks_total tokens_total batch_items
    batch_fill_ratio stage_seconds request_seconds queue_items queue_bytes inflight_requests rejected_total
    cancelled_total cache_hits_total cache_misses_total cache_evictions_total cache_bytes graphs_captured
    received_bytes_total delivered_bytes_total items_failed_total queue_limit_items queue_limit_bytes
    graph_capture_seconds graph_pool_bytes nonfinite_total engine_heartbeat_timestamp_seconds model_info
    delivery_seconds weights_info server_state queue_tokens queue_seconds device_memory_bytes
    tls_certificate_expiry_timestamp_seconds
""".split()  # noqa: SIM905 - a list of the contract's names reads best as words


def encoded() -> Outcome:
    report = ItemReport(Path.EAGER, None, 0, 1, 0.0, 0.0)
    return Encoded(Embedding(memoryview(b""), DType.FLOAT32, (1, 0)), report)


def value(metrics: Metrics, name: str, **labels: str) -> float:
    text = generate_latest(metrics.registry).decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics()
    timings = Timings(0.1, 0.2, 0.3)
    captured = budget(64, merge=2, max_items=8, max_frames=8)
    image, video = Modality.IMAGE, Modality.VIDEO
    ran = [(image, encoded()), (video, encoded()), (image, NonFinite("nan"))]
    made.engine.batch_ran(BatchReport(ran, 2, captured, None, 40, timings))
    made.engine.batch_ran(BatchReport([(video, EncodeFailed("x"))], 1, None, Fallback.OVERSIZE, 500, timings))
    return made


def test_items_are_hits_plus_fallbacks_plus_cache_hits(metrics: Metrics) -> None:
    hits = value(metrics, "vitwire_graph_hits_total")
    fallbacks = value(metrics, "vitwire_eager_fallbacks_total")
    cached = value(metrics, "vitwire_cache_hits_total")
    assert (hits, fallbacks, cached) == (3, 1, 0)
    assert value(metrics, "vitwire_items_total") == hits + fallbacks + cached
    assert value(metrics, "vitwire_items_total", path="graph", modality="image") == 2


def test_cache_hits_are_items_and_the_canary_is_none(metrics: Metrics) -> None:
    before = value(metrics, "vitwire_items_total")
    metrics.cache.cache_hit(Modality.VIDEO)
    metrics.cache.cache_missed()
    metrics.engine.canary_ran(passed=False)
    metrics.cache.changed(500, 300, 2)
    metrics.admission.changed(3, 700)
    assert value(metrics, "vitwire_items_total") == before + 1
    assert value(metrics, "vitwire_items_total", path="cache", modality="video") == 1
    assert value(metrics, "vitwire_cache_hits_total") == value(metrics, "vitwire_cache_misses_total") == 1
    assert value(metrics, "vitwire_canaries_total", result="failed") == 1
    assert (value(metrics, "vitwire_cache_bytes"), value(metrics, "vitwire_cache_evictions_total")) == (500, 2)
    assert value(metrics, "vitwire_store_bytes") == 300
    assert (value(metrics, "vitwire_admitted_items"), value(metrics, "vitwire_admitted_bytes")) == (3, 700)


def test_what_was_too_late_or_left_is_reported_by_stage(metrics: Metrics) -> None:
    metrics.engine.item_dropped("admission", "deadline")
    metrics.engine.item_dropped("queue", "deadline")
    metrics.rpc.send_cancelled()
    assert value(metrics, "vitwire_expired_total", stage="admission") == 1
    assert value(metrics, "vitwire_expired_total") == 2
    assert value(metrics, "vitwire_cancelled_total", stage="send") == value(metrics, "vitwire_cancelled_total") == 1


def test_padding_is_what_the_budget_has_beyond_the_items(metrics: Metrics) -> None:
    assert value(metrics, "vitwire_tokens_total", kind="real") == 540
    assert value(metrics, "vitwire_tokens_total", kind="padding") == 24
    assert value(metrics, "vitwire_graph_replays_total", budget="64") == 1
    assert value(metrics, "vitwire_nonfinite_total") == 1


def test_codes_that_items_fail_with_show_before_the_first_failure(metrics: Metrics) -> None:
    exposed = {
        sample.labels["code"]
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "vitwire_items_failed_total"
    }
    assert exposed == {code.name for _, code in _CODES}


def test_latencies_of_a_few_milliseconds_are_distinguished(metrics: Metrics) -> None:
    for seconds in (0.0012, 0.0022, 0.0035, 0.0045, 0.0055, 0.007, 0.009):
        metrics.rpc.request_seconds.labels("Encode").observe(seconds)
    buckets = Readings(metrics.registry).by("vitwire_request_seconds_bucket", "le", method="Encode")
    counts = {float(bound): count for bound, count in buckets.items()}
    assert all(upper - lower <= 1 for lower, upper in pairwise(counts.values())), "a bucket holds one of them at most"
    finite = [bound for bound in counts if bound != float("inf")]
    assert finite[0] == 0.0005
    assert finite[-1] >= 10
    assert all(upper <= 3 * lower for lower, upper in pairwise(finite))


def test_names_of_the_contract_are_exposed(metrics: Metrics) -> None:
    text = generate_latest(metrics.registry).decode()
    for name in NAMES:
        assert f"# TYPE vitwire_{name} " in text, name
    for name in ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "max_fds", "start_time_seconds"):
        assert f"# TYPE process_{name} " in text, name


def test_the_state_is_the_one_that_health_has_at_the_scrape() -> None:
    health = Health()
    metrics = Metrics(health)
    for state in (State.STARTING, State.WARMING, State.SERVING, State.FAILED):
        health.change(state, "as a test")
        assert value(metrics, "vitwire_server_state", state=state.value) == 1
        assert value(metrics, "vitwire_server_state") == 1


def test_memory_of_the_device_is_shown_by_kind_and_kept_when_the_device_is_lost() -> None:
    metrics, answers = Metrics(), [{"total": 80, "free": 30}, RuntimeError("lost"), {"total": 80, "free": 20}]
    metrics.engine.heartbeat()
    assert "vitwire_device_memory_bytes{" not in generate_latest(metrics.registry).decode(), "a CPU has none"

    def read() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    metrics.memory.reads(read)
    for free in (30, 30, 20):
        metrics.memory._due = 0.0
        metrics.engine.heartbeat()
        metrics.engine.heartbeat()
        assert value(metrics, "vitwire_device_memory_bytes", kind="free") == free
        assert value(metrics, "vitwire_device_memory_bytes") == 80 + free
    assert not answers, "it is read every few seconds, not in each beat"


def test_deliveries_are_shown_before_the_first_one_so_that_a_share_of_fallbacks_can_be_taken(metrics: Metrics) -> None:
    text = generate_latest(metrics.registry).decode()
    assert 'vitwire_delivery_seconds_count{way="nixl"} 0.0' in text
    assert 'vitwire_delivery_seconds_count{way="stream"} 0.0' in text
