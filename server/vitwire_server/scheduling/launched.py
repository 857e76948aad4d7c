"""A batch on the device, and what is reported of it once it is done."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from vitwire_server.core.budgets import Budget
from vitwire_server.core.errors import EncodeFailed, EncoderError
from vitwire_server.core.plans import Batch, Fallback
from vitwire_server.core.reports import BatchReport, Encoded, ItemReport, Outcome, Path
from vitwire_server.core.runner import Collected, Running
from vitwire_server.scheduling.planner import Prediction
from vitwire_server.scheduling.tickets import Entry

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launched:
    """A batch on the device and the entries in it."""

    entries: Sequence[Entry]
    batch: Batch
    running: Running
    started: float
    predicted: Prediction

    def outcomes(self, collected: Collected, now: float) -> list[Outcome]:
        """What each entry is answered with: its rows and a report, or its error."""
        budget, fallback = self._path(collected)

        def report(entry: Entry) -> ItemReport:
            return ItemReport(
                path=Path.EAGER if budget is None else Path.GRAPH,
                fallback=fallback,
                budget_tokens=0 if budget is None else budget.tokens,
                tokens=entry.item.rows,
                queued=self.started - entry.arrived,
                encoded=now - self.started,
                started=self.started,
                timings=collected.timings,
            )

        return [
            result if isinstance(result, EncoderError) else Encoded(result, report(entry))
            for entry, result in zip(self.entries, collected.results, strict=True)
        ]

    def report(self, collected: Collected, outcomes: Sequence[Outcome]) -> BatchReport:
        """What the monitor counts."""
        budget, fallback = self._path(collected)
        return BatchReport(
            items=[(entry.item.modality, outcome) for entry, outcome in zip(self.entries, outcomes, strict=True)],
            requests=len({entry.ticket for entry in self.entries}),
            budget=budget,
            fallback=fallback,
            tokens=sum(entry.item.footprint.tokens for entry in self.entries),
            timings=collected.timings,
        )

    def _path(self, collected: Collected) -> tuple[Budget | None, Fallback | None]:
        """How the batch ran in the end."""
        return (None, Fallback.OUT_OF_MEMORY) if collected.ran_separately else (self.batch.budget, self.batch.fallback)


def log_failures(entries: Sequence[Entry], outcomes: Sequence[Outcome]) -> None:
    """A line for each request and error: ERROR if the server failed, WARNING if the client's pixels are invalid."""
    failed: defaultdict[tuple[str, int, str], list[int]] = defaultdict(list)
    for entry, outcome in zip(entries, outcomes, strict=True):
        if isinstance(outcome, EncoderError):
            level = logging.ERROR if isinstance(outcome, EncodeFailed) else logging.WARNING
            failed[entry.ticket.request_id, level, str(outcome)].append(entry.index)
    for (request_id, level, error), items in failed.items():
        extra = {"request_id": request_id}
        _log.log(level, "items %s failed in a batch of %d: %s", items, len(entries), error, extra=extra)
