"""The loads that a server plans, what it learned of them, and the file that its restart begins with.

Loads are a histogram in which older ones fade: sizes only, never pixels.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vitwire_flags.regular_files import read_regular, replace_file
from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.capacities import Capacities
from vitwire_server.core.grids import Footprint
from vitwire_server.core.items import total

_log = logging.getLogger(__name__)
HALF_LIFE = 2048
"""Loads after which a load counts half."""
_MOST = 1024
"""Distinct loads that are kept; the lightest are dropped beyond it."""
_STEPS_PER_DOUBLING = 64
_RENORMALISED_AT = 1e12
_FEW_ITEMS = 4
"""Most items whose sum is a demand: of more, the planner chooses those that fill a budget."""
_FORMAT = 1
_MOST_BYTES = 1 << 20
_MOST_BUDGETS = 256


class LoadHistogram:
    """Weights of loads, by the tokens of the budget that would suit them exactly. Used by one thread."""

    def __init__(self, loads: Mapping[int, float] | None = None) -> None:
        """Begins with the `loads` of another histogram."""
        self._weights = dict(loads or {})
        self._unit = 1.0
        """The weight of a load that is added now; grows instead of all others shrinking."""
        self.added = 0

    def add(self, tokens: int, weight: float = 1.0) -> None:
        """Count a load."""
        self.added += 1
        self._unit *= 2 ** (1 / HALF_LIFE)
        self._weights[tokens] = self._weights.get(tokens, 0.0) + weight * self._unit
        if self._unit > _RENORMALISED_AT or len(self._weights) > _MOST:
            self._tidy()

    @property
    def loads(self) -> dict[int, float]:
        """A copy of the weights, in units of a load that is added now."""
        return {tokens: weight / self._unit for tokens, weight in self._weights.items()}

    def _tidy(self) -> None:
        heaviest = sorted(self.loads.items(), key=lambda load: -load[1])[: _MOST * 3 // 4]
        self._weights, self._unit = dict(heaviest), 1.0


@dataclass(frozen=True, slots=True)
class Demands:
    """Which budget the loads of a tower would need."""

    capacities: Capacities
    largest: int
    """Tokens of the largest budget."""
    max_items: int
    max_frames: int
    completed: Callable[[Ladder], Ladder] = lambda ladder: ladder
    """Adds budgets of as many tokens, for the longest segments and for many short ones."""

    def budget(self, tokens: int) -> Budget:
        """The budget that the tower has for this number of tokens."""
        return self.capacities.budget(tokens, max_items=self.max_items, max_frames=self.max_frames)

    def of(self, window: Sequence[Footprint], taken: int) -> int | None:
        """Tokens of the budget for the items that waited together, of which the batch took `taken`.

        None if no budget holds them, or if the planner could choose among many.
        """
        if taken < len(window) > _FEW_ITEMS:
            return None
        return self.needed(total(window), len(window))

    def needed(self, load: Footprint, items: int) -> int | None:
        """Tokens of the smallest budget for a load, rounded up by at most 2 %.

        None if none holds it, or if it would be divided: long and many short segments.
        """
        size = self.capacities.needed(load)
        while size is not None and size <= self.largest:
            rounded = min(self.largest, rounded_up(size))
            for candidate in (rounded, size):
                budget = self.budget(candidate)
                if self.completed(Ladder((budget,))).smallest_fitting(load, items):
                    return budget.tokens
                if budget.fits(load, items):
                    return None
            size = max(size + 1, size * 9 // 8)
        return None


def rounded_up(tokens: int) -> int:
    """The next of about 64 sizes per doubling; below 128 every number is one."""
    step = max(1, 1 << max(0, tokens.bit_length() - _STEPS_PER_DOUBLING.bit_length()))
    return -(-tokens // step) * step


@dataclass(frozen=True, slots=True)
class Learned:
    """A ladder and the histogram behind it, which a restart begins with."""

    sizes: tuple[int, ...]
    loads: Mapping[int, float]


class Header(msgspec.Struct, frozen=True):
    """Must be the same for a file to be used."""

    format: int
    weights: str
    """Their fingerprint."""
    device: str
    """The device's name, as its costs decide what is learned."""
    largest: int
    """Tokens of the largest budget."""


class _Document(Header, frozen=True):
    budgets: list[int]
    loads: dict[int, float]


@dataclass(frozen=True, slots=True)
class StateFile:
    """The file of one model on one kind of device, for one largest budget.

    Processes may share it: each write replaces it whole.
    """

    path: Path
    header: Header

    @classmethod
    def in_folder(cls, folder: Path, fingerprint: str, device: str, largest: int) -> "StateFile":
        """The file in a folder that may have files of other models, devices and largest budgets."""
        name = re.sub(r"[^a-z0-9]+", "-", f"{fingerprint[:16]}-{device}-{largest}".lower()).strip("-")
        return cls(folder / f"vitwire-ladder-{name}.json", Header(_FORMAT, fingerprint, device, largest))

    def read(self) -> Learned | None:
        """The ladder that was learned before. A file that cannot be used is ignored with a log line."""
        try:
            learned = self._parsed(read_regular(self.path, _MOST_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError, msgspec.DecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            _log.warning("%s is ignored, and replaced when a ladder is learned: %s", self.path, reason)
            return None
        _log.info("beginning with the %d budgets of %s", len(learned.sizes), self.path)
        return learned

    def write(self, learned: Learned) -> None:
        """Replace the file. An error is logged; nothing depends on the file."""
        loads = {size: round(weight, 4) for size, weight in learned.loads.items()}
        document = _Document(**msgspec.structs.asdict(self.header), budgets=list(learned.sizes), loads=loads)
        try:
            replace_file(self.path, msgspec.json.encode(document) + b"\n")
        except OSError as error:
            _log.warning("the learned ladder is not kept over a restart: %s", error)

    def _parsed(self, raw: bytes) -> Learned:
        """Raises ValueError, RecursionError or msgspec.DecodeError."""
        document = msgspec.json.decode(raw, type=_Document)
        for key, own in msgspec.structs.asdict(self.header).items():
            if (found := getattr(document, key)) != own:
                raise ValueError(f"{key} is {found!r}, this server has {own!r}")
        sizes, largest = sorted(set(document.budgets)), self.header.largest
        if not 1 <= len(sizes) <= _MOST_BUDGETS or sizes[0] < 1 or sizes[-1] != largest:
            raise ValueError(f"budgets must be 1 to {_MOST_BUDGETS} token counts, the largest {largest}")
        loads = document.loads
        if len(loads) > _MOST or not all(
            0 < size <= largest and 0 <= weight < _RENORMALISED_AT for size, weight in loads.items()
        ):
            raise ValueError(f"loads must be weights of token counts up to {largest}")
        return Learned(tuple(sizes), loads)
