"""The engine as the scheduler sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vitwire_server.core.budgets import Budget
from vitwire_server.core.errors import EncodeFailed, InvalidTensors
from vitwire_server.core.items import Embedding, Item


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a batch's time went, in seconds."""

    stage_in: float
    execute: float
    stage_out: float
    prepare: float = 0.0
    """The part of `execute` that prepares the pictures among its items; 0 without any."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Results of a batch: one embedding or failure per item, in the items' order."""

    results: Sequence[Embedding | EncodeFailed | InvalidTensors]
    timings: Timings | None
    """None if nothing ran."""
    ran_separately: bool = False
    """The device had too little memory for the batch, so its items ran eagerly, one by one."""


class Running(Protocol):
    """A batch on the device."""

    def collect(self) -> Collected:
        """Wait for the batch and bring its rows to the host. Raises DeviceLost."""
        ...


class Runner(Protocol):
    """Owns the device. Called by one thread only."""

    depth: int
    """Batches that may be on the device at once: 1 if execution is synchronous."""

    def launch(self, items: Sequence[Item], budget: Budget | None) -> Running:
        """Stage `items` and start their forward; None runs eagerly.

        Failures of these items are returned by `collect`. Raises DeviceLost.
        """
        ...
