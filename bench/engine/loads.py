"""Loads: closed loops (`c8`: 8 requests in flight) and Poisson arrivals (`p20`: 20 requests a second)."""

import random
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple, Self


class Size(NamedTuple):
    """Side of the square images, and images in each request; or a clip of that many frames."""

    side: int
    images: int = 1
    frames: int = 1
    """Of the clip that takes the place of the images; 1: none."""

    @property
    def is_kept(self) -> bool:
        """True if no processor resizes pictures of this size."""
        return self.side % 32 == 0 and self.side >= 128

    @classmethod
    def of(cls, text: str) -> Self:
        """SIDExIMAGES. Raises ValueError for anything else."""
        side, _, images = text.partition("x")
        if not side.isdecimal() or not (images or "1").isdecimal() or not int(side) or not int(images or 1):
            raise ValueError(f"a size is SIDE or SIDExIMAGES; got {text!r}")
        return cls(int(side), int(images or 1))

    def __str__(self) -> str:
        return f"{self.side}x{self.images}" if self.frames == 1 else f"{self.frames}x{self.side} clip"


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive."""

    closed: bool
    amount: float
    """Requests in flight of a closed loop, else requests per second."""

    @classmethod
    def of(cls, text: str) -> Self:
        """cN or pN. Raises ValueError for anything else."""
        closed, fault = text[:1] == "c", f"a load is cN, N in flight, or pN, N requests per second; got {text!r}"
        if text[:1] not in ("c", "p"):
            raise ValueError(fault)
        try:
            amount = int(text[1:]) if closed else float(text[1:])
        except ValueError:
            raise ValueError(fault) from None
        if not 0 < amount < inf:
            raise ValueError(fault)
        return cls(closed, amount)

    def __str__(self) -> str:
        return f"{'c' if self.closed else 'p'}{self.amount:g}"


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """When each of `count` requests of a Poisson process is due, in seconds since its start."""
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(count)))
