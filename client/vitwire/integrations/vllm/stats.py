"""Statistics of the EC connector, in vLLM's log and on its metrics page."""

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from vitwire.integrations.vllm.choice import ran

_COUNTERS = {
    "fetched": ("vllm:vitwire_ec_fetched_items", "Embeddings that all workers fetched from Vitwire."),
    "missing": ("vllm:vitwire_ec_missing_items", "Embeddings that Vitwire did not have cached; their requests failed."),
    "failed": ("vllm:vitwire_ec_failed_items", "Embeddings that could not be fetched; their requests failed."),
    "resent": (
        "vllm:vitwire_ec_resent_items",
        "Files of images that Vitwire had lost, and got again from each worker.",
    ),
    "seconds": ("vllm:vitwire_ec_fetch_seconds", "Seconds of all fetches, of each worker."),
    "streamed_bytes": ("vllm:vitwire_ec_streamed_bytes", "Bytes of embeddings that came in gRPC responses."),
    "nixl_bytes": ("vllm:vitwire_ec_nixl_bytes", "Bytes of embeddings that NIXL wrote into device memory."),
    "tower_seconds": ("vllm:vitwire_ec_tower_seconds", "Seconds of the engine's own tower, of each worker."),
    "tower_tokens": ("vllm:vitwire_ec_tower_tokens", "Embeddings that it made, of each worker."),
}


class VitwireECStats(ECConnectorStats):  # type: ignore[misc]  # vLLM has no type information
    """Sums by name of the counter."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: ECConnectorStats) -> "VitwireECStats":
        self.data = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in _COUNTERS}
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log; the times of its tower are on the metrics page only."""
        sums = {name: self.data.get(name, 0) for name in _COUNTERS if not name.startswith("tower_")}
        ended = sums["fetched"] + sums["missing"] + sums["failed"]
        milliseconds = 1e3 * sums.pop("seconds") / max(ended, 1)
        return sums | {"mean_milliseconds": round(milliseconds, 1)}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class VitwireECPromMetrics(ECConnectorPromMetrics):  # type: ignore[misc]  # as above
    """One counter for each sum."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            key: create_metric_per_engine(
                self._counter_cls(name=name, documentation=text, labelnames=labelnames), per_engine_labelvalues
            )
            for key, (name, text) in _COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if tokens := transfer_stats_data.get("tower_tokens"):
            ran(transfer_stats_data["tower_seconds"], tokens)
        for key, counters in self._counters.items():
            if value := transfer_stats_data.get(key):
                counters[engine_idx].inc(value)
