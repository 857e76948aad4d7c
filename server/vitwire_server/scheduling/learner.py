"""What fits the ladder to the loads that are planned, as the scheduler sees it."""

from collections.abc import Sequence
from typing import Protocol

from vitwire_server.core.grids import Footprint
from vitwire_server.scheduling.planner import Planner


class Learner(Protocol):
    """Changes the ladder while batches run. Called by the engine's thread only."""

    def planned(self, window: Sequence[Footprint], taken: int) -> None:
        """A batch takes `taken` of the items that waited."""
        ...

    def seconds_until_due(self) -> float:
        """When to call `step`; infinite while there is nothing to do."""
        ...

    def step(self) -> Planner | None:
        """Do a part of the work, which takes about as long as a batch.

        Returns the planner to use from now on, if that changes. Raises DeviceLost.
        """
        ...

    def replaced(self) -> None:
        """The planner that `step` returned is in use, and nothing is in flight on budgets that it does not have."""
        ...
