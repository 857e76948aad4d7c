"""Log lines of items that failed on the engine."""

import logging
from collections import defaultdict
from collections.abc import Sequence

from vitwire_server.core.errors import EncodeFailed, EncoderError
from vitwire_server.core.reports import Outcome
from vitwire_server.scheduling.tickets import Entry

_log = logging.getLogger(__name__)


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
