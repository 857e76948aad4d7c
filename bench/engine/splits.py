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
    """Setups that run one after another on the same processes; those that a setup does not use are idle."""

    splits: tuple[Split, ...]

    @property
    def engines(self) -> int:
        return max(split.engines for split in self.splits)

    @property
    def encoder_devices(self) -> range:
        """The same for all setups that have encoders."""
        return next((split.encoder_devices for split in self.splits if split.encoders), range(0))


def grouped(splits: Sequence[Split]) -> list[Group]:
    """Each setup once. An engine knows its encoders from its start, so setups with others need other processes."""
    remote = [split for split in splits if split.encoders]
    places = list(dict.fromkeys(split.encoder_devices for split in remote)) or [range(0)]
    groups = [[split for split in remote if split.encoder_devices == place] for place in places]
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
