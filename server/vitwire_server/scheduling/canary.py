"""A test item that runs while the engine is idle, so that a dead device shows before a user's request fails."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from vitwire_server.core.errors import EncoderError
from vitwire_server.core.items import Item
from vitwire_server.core.plans import Batch
from vitwire_server.core.runner import Runner
from vitwire_server.scheduling.planner import Planner

_log = logging.getLogger(__name__)
_TRIES = 2
"""Failures in a row after which the engine counts as broken: one may have a passing cause, such as memory in use."""


@dataclass(slots=True)
class Canary:
    """Runs after every `seconds` of idleness; not counted as a user's item. Used by the engine's thread."""

    item: Item
    batch: Batch
    seconds: float
    """0 switches it off."""
    fault: str = ""
    """The fault of the engine; empty while it encodes. Read by any thread."""
    _last_run: float = 0.0
    _failures: int = 0

    def plan(self, planner: Planner) -> None:
        """Run as this planner says from now on."""
        (self.batch,) = planner.plan([self.item.footprint]).batches

    def is_due(self, now: float, last_launch: float) -> bool:
        """True if neither a batch nor this item ran for long enough."""
        return 0 < self.seconds <= now - max(last_launch, self._last_run)

    def run(self, runner: Runner, clock: Callable[[], float]) -> bool:
        """Encode the item; returns whether that worked. Raises DeviceLost."""
        (result,) = runner.launch([self.item], self.batch.budget).collect().results
        self._last_run = clock()
        if not isinstance(result, EncoderError):
            self._failures, self.fault = 0, ""
            return True
        self._failures += 1
        _log.error("the canary failed (%d in a row): %s", self._failures, result)
        if self._failures >= _TRIES:
            self.fault = f"the canary failed {self._failures} times in a row: {result}"
        return False
