"""The panels of the Grafana dashboard, row by row."""

from collections.abc import Sequence
from dataclasses import dataclass

_OWN = 'job=~"$job",instance=~"$instance"'
_RPCS = 'method=~"Encode|EncodeStream"'


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A time series over a third of the width."""

    title: str
    unit: str
    """Grafana's id of a unit."""
    queries: Sequence[Query]
    description: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below a title."""

    title: str
    panels: Sequence[Panel]


def _rate(metric: str, by: str = "", labels: str = "") -> str:
    """Sum of the rates of a counter."""
    selector = f"{_OWN},{labels}" if labels else _OWN
    return f"sum {f'by ({by}) ' if by else ''}(rate({metric}{{{selector}}}[$__rate_interval]))"


def _gauge(metric: str, by: str, labels: str = "") -> str:
    selector = f"{_OWN},{labels}" if labels else _OWN
    return f"sum by ({by}) ({metric}{{{selector}}})"


def _quantiles(metric: str, by: str, labels: str = "") -> list[Query]:
    legend = " ".join(f"{{{{{name.strip()}}}}}" for name in by.split(",") if name) + " " if by else ""
    both = f"{by}, le" if by else "le"
    return [
        Query(f"histogram_quantile({share}, {_rate(f'{metric}_bucket', both, labels)})", f"{legend}{name}")
        for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    ]


def _share(metric: str, part: str, whole: str = "", by: str = "") -> str:
    return f"{_rate(metric, by, part)} / {_rate(metric, by, whole)}"


def _mean(metric: str) -> str:
    return f"{_rate(f'{metric}_sum')} / {_rate(f'{metric}_count')}"


ROWS = (
    Row("Service", (
        Panel("Servers by state", "short", [Query(f"sum by (state) (vitwire_server_state{{{_OWN}}})", "{{state}}")]),
        Panel("Items per second", "short", [Query(_rate("vitwire_items_total", "path"), "{{path}}")]),
        Panel("Request duration", "s", _quantiles("vitwire_request_seconds", "method", _RPCS),
              "An EncodeStream lasts as long as its client keeps it open."),
        Panel("Requests per second", "reqps", [
            Query(_rate("vitwire_requests_total", "method, code", _RPCS), "{{method}} {{code}}")]),
        Panel("Rejected per second", "short", [Query(_rate("vitwire_rejected_total", "reason"), "{{reason}}")]),
        Panel("Items failed, expired or cancelled per second", "short", [
            Query(_rate("vitwire_items_failed_total", "code"), "{{code}}"),
            Query(_rate("vitwire_expired_total", "stage"), "expired in {{stage}}"),
            Query(_rate("vitwire_cancelled_total", "stage"), "cancelled in {{stage}}")]),
    )),
    Row("Load", (
        Panel("Items admitted and queued", "short", [
            Query(_gauge("vitwire_admitted_items", "instance"), "{{instance}} admitted"),
            Query(_gauge("vitwire_queue_items", "instance"), "{{instance}} queued"),
            Query(_gauge("vitwire_queue_limit_items", "instance"), "{{instance}} limit")]),
        Panel("Bytes admitted and queued", "bytes", [
            Query(_gauge("vitwire_admitted_bytes", "instance"), "{{instance}} admitted"),
            Query(_gauge("vitwire_queue_bytes", "instance"), "{{instance}} queued"),
            Query(_gauge("vitwire_queue_limit_bytes", "instance"), "{{instance}} limit")]),
        Panel("Tokens queued", "short", [Query(_gauge("vitwire_queue_tokens", "instance"), "{{instance}}")]),
        Panel("Predicted time of what is queued", "s", [
            Query(_gauge("vitwire_queue_seconds", "instance"), "{{instance}}")]),
        Panel("Requests in flight", "short", [
            Query(_gauge("vitwire_inflight_requests", "instance"), "{{instance}}")]),
        Panel("p99 by stage", "s", [
            Query(f"histogram_quantile(0.99, {_rate('vitwire_stage_seconds_bucket', 'stage, le')})", "{{stage}}")],
            "queue and send are per item, the others per batch."),
        Panel("Mean items per batch", "short", [
            Query(_mean("vitwire_batch_items"), "items"), Query(_mean("vitwire_batch_requests"), "requests")]),
        Panel("Bytes per second", "Bps", [
            Query(_rate("vitwire_received_bytes_total"), "received"),
            Query(_rate("vitwire_delivered_bytes_total", "way"), "delivered by {{way}}")]),
    )),
    Row("Graphs", (
        Panel("Graph hit rate", "percentunit", [
            Query(_share("vitwire_items_total", 'path="graph"', 'path=~"graph|eager"'), "hits")],
            "Of the items that were encoded; items from the cache need no graph."),
        Panel("Eager fallbacks per second", "short", [
            Query(_rate("vitwire_eager_fallbacks_total", "reason"), "{{reason}}")]),
        Panel("Padding by budget", "percentunit", [
            Query(_share("vitwire_graph_tokens_total", 'kind="padding"', by="budget"), "{{budget}}"),
            Query(_share("vitwire_graph_tokens_total", 'kind="padding"'), "all")]),
        Panel("Replays per second", "short", [Query(_rate("vitwire_graph_replays_total", "budget"), "{{budget}}")]),
        Panel("Tokens per second", "short", [Query(_rate("vitwire_tokens_total", "kind"), "{{kind}}")]),
        Panel("Graphs", "short", [
            Query(_gauge("vitwire_graphs_captured", "instance"), "{{instance}} captured"),
            Query(_gauge("vitwire_graphs_dropped", "instance"), "{{instance}} failed")]),
        Panel("Servers by budget in use", "short", [Query(_gauge("vitwire_ladder_budgets", "budget"), "{{budget}}")]),
        Panel("Fits of the ladder in an hour", "short", [
            Query(f"sum by (result) (increase(vitwire_ladder_refits_total{{{_OWN}}}[1h]))", "{{result}}")],
            "Unless budgets are given; swapped: another ladder is in use."),
        Panel("Longest wait during the last change of the ladder", "s", [
            Query(_gauge("vitwire_ladder_pause_seconds", "instance"), "{{instance}}")]),
    )),
    Row("Cache, files and delivery", (
        Panel("Cache hit rate", "percentunit", [
            Query(f"{_rate('vitwire_cache_hits_total')}"
                  f" / ({_rate('vitwire_cache_hits_total')} + {_rate('vitwire_cache_misses_total')})", "hits")]),
        Panel("Cache", "bytes", [
            Query(_gauge("vitwire_cache_bytes", "instance"), "{{instance}} host"),
            Query(_gauge("vitwire_store_bytes", "instance"), "{{instance}} device")]),
        Panel("Evictions per second", "short", [
            Query(_rate("vitwire_cache_evictions_total", "instance"), "{{instance}}")]),
        Panel("Embeddings copied between device and host", "Bps", [
            Query(_rate("vitwire_copied_bytes_total", "to"), "to the {{to}}")]),
        Panel("Time to decode a file", "s", _quantiles("vitwire_decode_seconds", "modality")),
        Panel("Files not decoded per second", "short", [
            Query(_rate("vitwire_decode_failures_total", "reason"), "{{reason}}")]),
        Panel("Delivery", "s", _quantiles("vitwire_delivery_seconds", "way")),
        Panel("Deliveries that fell back per second", "short", [
            Query(_rate("vitwire_delivery_fallbacks_total", "reason"), "{{reason}}")]),
        Panel("Pictures and files prepared per second", "short", [
            Query(_rate("vitwire_prepared_total", "where, reason"), "{{where}} {{reason}}")]),
    )),
    Row("Processes", (
        Panel("Seconds since the engine's heartbeat", "s", [
            Query(f"time() - (vitwire_engine_heartbeat_timestamp_seconds{{{_OWN}}} > 0)", "{{instance}}")]),
        Panel("Cores by process", "short", [
            Query(_rate("vitwire_process_cpu_seconds_total", "instance, process"), "{{instance}} {{process}}")]),
        Panel("Memory by process", "bytes", [
            Query(_gauge("vitwire_process_resident_memory_bytes", "instance, process"), "{{instance}} {{process}}")]),
        Panel("Restarts of RPC processes in an hour", "short", [
            Query(f"increase(vitwire_process_restarts_total{{{_OWN}}}[1h])", "{{instance}} {{process}}")]),
        Panel("Test items and embeddings that failed per second", "short", [
            Query(_rate("vitwire_canaries_total", labels='result="failed"'), "test items"),
            Query(_rate("vitwire_nonfinite_total"), "not finite")]),
        Panel("Device memory", "bytes", [
            Query(_gauge("vitwire_device_memory_bytes", "instance, kind"), "{{instance}} {{kind}}")],
            "None on a CPU."),
        Panel("Time until the certificate expires", "s", [
            Query(f"(vitwire_tls_certificate_expiry_timestamp_seconds{{{_OWN}}} > 0) - time()", "{{instance}}")],
            "With TLS."),
        Panel("Weights", "short", [
            Query(f"count by (fingerprint) (vitwire_weights_info{{{_OWN}}})", "{{fingerprint}}")],
            "Servers by the fingerprint of their weights."),
    )),
    Row("Router", (
        Panel("Requests per second", "reqps", [
            Query(_rate("vitwire_router_requests_total", "route, code"), "{{route}} {{code}}")]),
        Panel("Time by stage", "s", _quantiles("vitwire_router_stage_seconds", "stage"),
              "engine: until its first byte."),
        Panel("Failures of upstreams per second", "short", [
            Query(_rate("vitwire_router_failures_total", "upstream, code"), "{{upstream}} {{code}}"),
            Query(_rate("vitwire_router_fallbacks_total", "reason"), "left to the engine: {{reason}}")]),
        Panel("Images per second", "short", [
            Query(_rate("vitwire_router_images_total", "source, result"), "{{source}} {{result}}")]),
        Panel("Requests in flight", "short", [
            Query(_gauge("vitwire_router_inflight_requests", "instance"), "{{instance}}")]),
        Panel("Rejected and cancelled per second", "short", [
            Query(_rate("vitwire_router_rejected_total", "reason"), "rejected: {{reason}}"),
            Query(_rate("vitwire_router_cancelled_total", "stage"), "cancelled in {{stage}}")]),
    )),
)  # fmt: skip
