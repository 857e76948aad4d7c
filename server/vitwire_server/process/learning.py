"""`--budgets learn`: where a server begins, and what follows the loads from there."""

import errno
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.core.budgets import Ladder
from vitwire_server.core.capacities import CropCapacities
from vitwire_server.core.reports import LadderMonitor
from vitwire_server.fitting.learned import Demands, Learned, StateFile
from vitwire_server.runtime.ladders.learning import LadderLearner
from vitwire_server.runtime.ladders.live_capture import LiveCapture
from vitwire_server.scheduling.planner import Planner
from vitwire_server.towers.tower import Tower

_log = logging.getLogger(__name__)
_LEAST_ROOM = 64 << 20
"""Bytes that the graphs may grow by even if those at the start took all of `--graph-memory`."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The ladder to begin with, and what it comes from."""

    ladder: Ladder
    default: Ladder
    demands: Demands
    file: StateFile
    learned: Learned | None

    def learner(self, capture: LiveCapture, planner: Planner, monitor: LadderMonitor) -> LadderLearner | None:
        """What follows the loads while `planner` is in use; None if nothing was captured that it could change."""
        captured = Ladder(tuple(budget for budget in self.default if budget.tokens <= _largest(planner.ladder)))
        if captured.largest is None:
            return None
        demands = replace(self.demands, largest=captured.largest.tokens)
        return LadderLearner(capture, planner, demands, captured, monitor, keep=self.file.write, learned=self.learned)


def _largest(ladder: Ladder) -> int:
    return ladder.largest.tokens if ladder.largest else 0


def beginning(
    settings: ServeSettings, tower: Tower, folder: Path, fingerprint: str, default: Ladder
) -> Beginning | None:
    """What was learned before, or else `default`; None if nothing can be learned.

    `folder` is the checkpoint's. Raises UsageError.
    """
    if not settings.learns or default.largest is None:
        return None
    if settings.compile == "on" and tower.device.type == "cuda":
        raise UsageError("--budgets learn and --compile on cannot be used together: batches would wait for a compiler")
    if isinstance(tower.capacities, CropCapacities):
        _log.warning("--budgets learn has no effect: the default ladder has all budgets that this model can have")
        return None
    largest = default.largest.tokens
    device = torch.cuda.get_device_name(tower.device) if tower.device.type == "cuda" else "cpu"
    file = StateFile.in_folder(settings.state_dir or _checkpoint(folder), fingerprint, device, largest)
    learned = file.read()
    bounds = {"max_items": settings.max_items_per_batch, "max_frames": settings.max_frames_per_batch}
    demands = Demands(tower.capacities, largest, **bounds)
    sizes = learned.sizes if learned else [budget.tokens for budget in default]
    ladder = Ladder(tuple(sorted({demands.budget(size) for size in sizes})))
    return Beginning(ladder, default, demands, file, learned)


def memory_bound(graph_memory: int, taken: int) -> int:
    """Bytes that the graphs may grow by, of which `taken` are those at the start."""
    return max(_LEAST_ROOM, graph_memory - taken)


def check_state_dir(folder: Path) -> None:
    """Raises OSError if what is learned cannot be kept in this folder, which is made if there is none."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "it cannot be written", str(folder))


def _checkpoint(folder: Path) -> Path:
    """The checkpoint's folder; a warning if nothing can be kept there."""
    if not os.access(folder, os.W_OK | os.X_OK):
        _log.warning("%s cannot be written: learned ladders are lost on a restart; set --state-dir", folder)
    return folder
