"""An item of our own through the engine while nobody else uses it, so that a dead device shows before a user does."""

import logging
from dataclasses import dataclass

from vitwire_server.core.errors import EncoderError
from vitwire_server.core.items import Item
from vitwire_server.core.plans import Batch
from vitwire_server.core.runner import Runner

_log = logging.getLogger(__name__)
_TRIES = 2
"""Failures in a row that make an ailment; one may be somebody else's, such as memory that was taken."""


@dataclass(slots=True)
class Canary:
    """Sings after every `seconds` of idleness; counts as no user's item. Used by the engine's thread."""

    item: Item
    batch: Batch
    seconds: float
    """0 keeps it silent."""
    ailment: str = ""
    """What is wrong with the engine; empty while it encodes."""
    _failures: int = 0

    def is_due(self, idle: float) -> bool:
        """Whether the engine was idle for long enough."""
        return 0 < self.seconds <= idle

    def sing(self, runner: Runner) -> bool:
        """Encode the item; returns whether that worked. Raises DeviceLost."""
        (result,) = runner.launch([self.item], self.batch.budget).collect().results
        if not isinstance(result, EncoderError):
            self._failures, self.ailment = 0, ""
            return True
        self._failures += 1
        _log.error("the canary failed (%d in a row): %s", self._failures, result)
        if self._failures >= _TRIES:
            self.ailment = f"the canary failed {self._failures} times in a row: {result}"
        return False
