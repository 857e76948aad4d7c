"""Metrics of the ladder in use, and of its changes with `--budgets learn`. Recorded on the engine thread."""

from collections.abc import Iterable

from vitwire_server.core.budgets import Budget
from vitwire_server.core.reports import Refit
from vitwire_server.observe.metrics.series import Series


class LadderMetrics:
    """Budgets in use, fits, and what the last change was predicted to bring; implements core's `LadderMonitor`."""

    def __init__(self, series: Series) -> None:
        self._refits = series.counter(
            "ladder_refits", "Fits of the ladder to recent loads, by what came of them", "result"
        )
        self._seconds = series.counter(
            "ladder_refit_seconds", "Time of the engine thread spent on changes of the ladder"
        )
        self._captured = series.gauge("graphs_captured", "Budgets whose graph was captured and is in use")
        self._budgets = series.gauge("ladder_budgets", "1 for budgets in use, 0 for those that were replaced", "budget")
        self._gain = series.gauge(
            "ladder_gain_ratio", "Share of predicted time that the last change of the ladder saves"
        )
        self._pause = series.gauge("ladder_pause_seconds", "Longest time that batches waited during the last change")
        self._grown = series.gauge("ladder_grown_bytes", "Graph memory that changes of the ladder added")
        self._shown: set[str] = set()
        for result in Refit:
            self._refits.labels(result)

    def in_use(self, ladder: Iterable[Budget]) -> None:
        """These budgets are in use, and no others."""
        budgets = set(ladder)
        sizes = {str(budget.tokens) for budget in budgets}
        self._shown |= sizes
        self._captured.set(len(budgets))
        for size in self._shown:
            self._budgets.labels(size).set(size in sizes)

    def refitted(self, result: Refit) -> None:
        """A fit came to this."""
        self._refits.labels(result).inc()

    def spent(self, seconds: float) -> None:
        """The engine thread worked on a change."""
        self._seconds.inc(seconds)

    def changed(self, ladder: Iterable[Budget], gain: float, pause: float, grown: int) -> None:
        """Another ladder is in use."""
        self.in_use(ladder)
        self._gain.set(gain)
        self._pause.set(pause)
        self._grown.set(grown)
