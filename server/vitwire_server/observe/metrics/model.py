"""Metrics of the loaded model and its graphs, recorded once while it loads, and of the server's state."""

from collections.abc import Mapping
from functools import partial

from vitwire_server.core.budgets import Budget
from vitwire_server.core.health import Health, State
from vitwire_server.core.models import ModelCard
from vitwire_server.observe.metrics.series import Series


class ModelMetrics:
    """The model that is served, and the capture of its graphs."""

    def __init__(self, series: Series) -> None:
        self._model = series.gauge(
            "model_info",
            "The model being served; always 1",
            "model",
            "model_type",
            "dtype",
            "device",
            "graphs",
            "attention",
        )
        self._weights = series.gauge("weights_info", "Fingerprint of the weights being served; always 1", "fingerprint")
        self._similarity = series.gauge(
            "precision_similarity",
            "With --precision fp8, least cosine similarity of a row of the test pictures to bfloat16; otherwise 1",
        )
        self._preparation = series.gauge(
            "preparation_info",
            "Where pictures are prepared and JPEG files decoded, and why not on the device; always 1",
            "what",
            "where",
            "reason",
        )
        self._dropped = series.gauge("graphs_dropped", "Budgets whose capture failed")
        self._attention = series.gauge(
            "budget_info",
            "The attention backend of a captured budget, and its longest segment; always 1",
            "budget",
            "segment_patches",
            "attention",
        )
        self._capture_seconds = series.gauge("graph_capture_seconds", "Time it took to capture all graphs")
        self._pool_bytes = series.gauge("graph_pool_bytes", "Bytes of static buffers and graph memory")

    def loaded(self, fingerprint: str, *, similarity: float, **labels: str) -> None:
        """Set the labels of the info metrics."""
        self._similarity.set(similarity)
        self._weights.labels(fingerprint).set(1)
        self._model.labels(**labels).set(1)

    def described(self, card: ModelCard) -> None:
        """Where pictures are prepared and JPEG files decoded, if they are."""
        if card.prepared:
            for what, found in (("prepare", card.preparation), ("decode", card.decoding)):
                self._preparation.labels(what, found.place, found.reason or "").set(1)

    def captured(self, dropped: int, seconds: float, nbytes: int) -> None:
        """Capture is done."""
        self._dropped.set(dropped)
        self._capture_seconds.set(seconds)
        self._pool_bytes.set(nbytes)

    def attends(self, backends: Mapping[Budget, str]) -> None:
        """The budgets that are used, and the attention backend of each."""
        self._attention.clear()
        for budget, backend in backends.items():
            self._attention.labels(str(budget.tokens), str(budget.max_segment_patches), backend).set(1)


class StateMetrics:
    """The server's state, read from its health at each scrape."""

    def __init__(self, series: Series, health: Health) -> None:
        gauge = series.gauge("server_state", "1 for the state that the server is in, else 0", "state")
        for state in State:
            gauge.labels(state.value).set_function(partial(_is_in, health, state))


def _is_in(health: Health, state: State) -> float:
    return float(health.state is state)
