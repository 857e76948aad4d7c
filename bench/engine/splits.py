"""Devices split into engines and encoders, and a load split over engines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from bench.engine.loads import Load


@dataclass(frozen=True, slots=True)
class Split:
    """Engines on the first devices, one each; encoders on the devices that follow."""

    engines: int
    encoders: int

    @classmethod
    def of(cls, text: str) -> Self:
        """ENGINES+ENCODERS. Raises ValueError for anything else."""
        engines, _, encoders = text.partition("+")
        if not (engines.isdecimal() and encoders.isdecimal() and int(engines)):
            raise ValueError(f"a setup is ENGINES+ENCODERS, such as 3+1, with at least one engine; got {text!r}")
        return cls(int(engines), int(encoders))

    def __str__(self) -> str:
        return f"{self.engines}+{self.encoders}"

    @property
    def devices(self) -> int:
        return self.engines + self.encoders

    @property
    def local(self) -> "Split":
        """As many devices, all of them engines."""
        return Split(self.devices, 0)

    @property
    def encoder_devices(self) -> range:
        return range(self.engines, self.devices)


@dataclass(frozen=True, slots=True)
class Group:
    """Setups that are measured on the same processes; those that a setup does not use are idle."""

    splits: tuple[Split, ...]

    @property
    def engines(self) -> int:
        return max(split.engines for split in self.splits)

    @property
    def stages(self) -> list[list[Split]]:
        """Setups that take turns, those with the most encoders first; those without any are in the last stage."""
        sizes = sorted({split.encoders for split in self.splits if split.encoders}, reverse=True) or [0]
        return [
            [split for split in self.splits if split.encoders in ({size, 0} if size == sizes[-1] else {size})]
            for size in sizes
        ]

    @property
    def encoder_devices(self) -> range:
        """Of all its setups."""
        return max((split.encoder_devices for split in self.splits), key=len)


def grouped(splits: Sequence[Split]) -> list[Group]:
    """Each setup once. Setups of equally many devices have their encoders on the last of them, and share processes."""
    remote = [split for split in splits if split.encoders]
    groups = [[each for each in remote if each.devices == count] for count in dict.fromkeys(s.devices for s in remote)]
    groups = groups or [[]]
    groups[0] = [split for split in splits if not split.encoders] + groups[0]
    return [Group(tuple(dict.fromkeys(group))) for group in groups]


def shares(load: Load, requests: int, engines: int) -> list[tuple[Load, int]]:
    """Load and number of requests of each engine; fewer engines than there are if fewer requests are in flight.

    Those of a closed loop differ by one at most. Of Poisson arrivals each engine gets an independent stream, as from a
    balancer that chooses at random.
    """
    used = min(engines, int(load.amount)) if load.closed else engines
    parts = [len(range(index, int(load.amount), used)) if load.closed else load.amount / used for index in range(used)]
    return [(Load(load.closed, part), max(1, round(requests * part / load.amount))) for part in parts]
