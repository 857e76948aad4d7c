"""A batch on the device, and what is reported of it once it is done."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from vitwire_server.core.errors import EncodeFailed, EncoderError
from vitwire_server.core.items import Embedding
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

    def report(self, collected: Collected, now: float) -> BatchReport:
        """The outcome of each entry, its rows and a report or its error, and the figures that the monitor counts."""
        budget, fallback = self.batch.budget, self.batch.fallback
        if collected.ran_separately:
            budget, fallback = None, Fallback.OUT_OF_MEMORY

        def outcome(entry: Entry, result: Embedding | EncoderError) -> Outcome:
            if isinstance(result, EncoderError):
                return result
            report = ItemReport(
                path=Path.GRAPH if budget else Path.EAGER,
                fallback=fallback,
                budget_tokens=budget.tokens if budget else 0,
                tokens=entry.item.rows,
                queued=self.started - entry.arrived,
                encoded=now - self.started,
                started=self.started,
                timings=collected.timings,
            )
            return Encoded(result, report)

        results = zip(self.entries, collected.results, strict=True)
        return BatchReport(
            items=[(entry.item.modality, outcome(entry, result)) for entry, result in results],
            requests=len({entry.ticket for entry in self.entries}),
            budget=budget,
            fallback=fallback,
            tokens=sum(entry.item.footprint.tokens for entry in self.entries),
            timings=collected.timings,
        )


def log_failures(entries: Sequence[Entry], report: BatchReport) -> None:
    """A line for each request and error: ERROR if the server failed, WARNING if the client's pixels are invalid."""
    failed: defaultdict[tuple[str, int, str], list[int]] = defaultdict(list)
    for entry, (_, outcome) in zip(entries, report.items, strict=True):
        if isinstance(outcome, EncoderError):
            level = logging.ERROR if isinstance(outcome, EncodeFailed) else logging.WARNING
            failed[entry.ticket.request_id, level, str(outcome)].append(entry.index)
    for (request_id, level, error), items in failed.items():
        extra = {"request_id": request_id}
        _log.log(level, "items %s failed in a batch of %d: %s", items, len(entries), error, extra=extra)
