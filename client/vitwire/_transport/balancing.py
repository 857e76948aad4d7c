"""Splits requests between replicas: by tokens, and by content for the sake of their caches."""

import hashlib
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitwire._transport.attempts import patches_of
from vitwire.items import Item
from vitwire.model import Model

Spread = int | Literal["auto"]

CONTENT_HEADER = "x-vitwire-content-id"
"""Metadata with the hint of a call; proxies and `Client(affinity=True)` hash it to choose a replica."""
REPLICA_HEADER = "x-vitwire-replica"
"""Trailing metadata with a random name of the engine that served a call."""
MAX_ROUTED = 32
"""Maximum RPCs that one request is split into by content ids."""
_HINT_BYTES = 16
_LARGE_TOKENS = 4096
"""Tokens that are worth another replica, if the server has no budgets."""
_KNOWN_SECONDS = 60.0
"""Seconds that a replica counts after its last response."""


class Share(NamedTuple):
    """Positions of the items that one RPC carries, in ascending order, and the hint that it sends."""

    indices: tuple[int, ...]
    hint: str | None = None
    is_routed: bool = False
    """Whether the client itself chooses the replica by the hint."""


@dataclass(frozen=True, slots=True)
class Balancing:
    """The rule by which requests are split into RPCs. Raises ValueError for an invalid spread."""

    spread: Spread = 1
    affinity: bool = False

    def __post_init__(self) -> None:
        if self.spread != "auto" and (isinstance(self.spread, str) or self.spread < 1):
            raise ValueError(f"spread must be at least 1 or 'auto', got {self.spread!r}")

    def shares(self, items: Mapping[int, Item], model: Model, replicas: int) -> list[Share]:
        """The items of a request, by position, as shares of about the same number of tokens, none of them empty.

        Items with the same content id stay together. With affinity, each content id is a share of its own, up to
        MAX_ROUTED of them.
        """
        costs = {index: tokens_of(item, model) for index, item in items.items()}
        named, unnamed = _groups(items)
        worth = math.ceil(sum(costs.values()) / _largest(model))
        count = max(1, min(replicas, worth)) if self.spread == "auto" else self.spread
        if not self.affinity:
            parted = balanced([*named, *unnamed], costs, count)
        else:
            routed = named if len(named) <= MAX_ROUTED else balanced(named, costs, MAX_ROUTED)
            parted = [*routed, *balanced(unnamed, costs, count)]
        return [self._share(sorted(own), items) for own in parted]

    def _share(self, indices: Sequence[int], items: Mapping[int, Item]) -> Share:
        named = (content_id for index in indices if (content_id := items[index].content_id))
        hint = next(map(hint_of, named), None)
        return Share(tuple(indices), hint, self.affinity and hint is not None)


class Replicas:
    """The replicas that answered recently. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}

    def saw(self, trailers: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Note the replica that sent this trailing metadata."""
        names = [value for key, value in trailers or () if key == REPLICA_HEADER and isinstance(value, str)]
        with self._lock:
            self._seen.update(dict.fromkeys(names, time.monotonic()))

    def count(self) -> int:
        """The number of known replicas."""
        oldest = time.monotonic() - _KNOWN_SECONDS
        with self._lock:
            self._seen = {name: at for name, at in self._seen.items() if at > oldest}
            return len(self._seen)


def tokens_of(item: Item, model: Model) -> int:
    """Tokens that the tower computes for an item, before pruning and pooling: of tiles by area.

    Of files and pictures a guess, as the server chooses their size: at most those of its largest budget.
    """
    if not any(item.grid) and (item.encoded is not None or item.pixels is not None):
        return min(max(1, patches_of(item) // model.merge_size**2), _largest(model))
    if model.tiles is None:
        return max(1, math.prod(item.grid) // model.merge_size**2)
    shapes, tiles = model.tiles, item.grid[0]
    crops = item.crops.shape[0] if item.crops is not None else max(0, tiles - 1) if shapes.crop else 0
    if item.pixels is not None:
        tiles = item.pixels.shape[0]
    elif shapes.crop:
        tiles = 1
    area = tiles * math.prod(shapes.tile) + crops * math.prod(shapes.crop or (0, 0))
    return max(1, area // (max(1, model.patch_size) * model.merge_size) ** 2)


def _largest(model: Model) -> int:
    """Tokens that are worth another replica."""
    return model.budgets[-1].tokens if model.budgets else _LARGE_TOKENS


def hint_of(content_id: str) -> str:
    """A hash of a content id: valid as a header, of fixed length, and not readable in a proxy's log."""
    return hashlib.sha256(content_id.encode("utf-8", "surrogatepass")).hexdigest()[: 2 * _HINT_BYTES]


def balanced(groups: list[list[int]], costs: Mapping[int, int], count: int) -> list[list[int]]:
    """The groups in at most `count` parts of about the same cost, none of them empty.

    Longest processing time first (Graham 1969): groups by descending cost, each to the part with the lowest cost.
    """
    parts: list[list[int]] = [[] for _ in range(min(count, len(groups)))]
    loads = [0] * len(parts)
    weighed = [(sum(costs[index] for index in group), group) for group in groups]
    for cost, group in sorted(weighed, key=lambda each: -each[0]):
        lightest = loads.index(min(loads))
        parts[lightest].extend(group)
        loads[lightest] += cost
    return parts


def _groups(items: Mapping[int, Item]) -> tuple[list[list[int]], list[list[int]]]:
    """Positions of items that share a content id, and positions of each item without one."""
    named: dict[str, list[int]] = {}
    for index, item in items.items():
        if item.content_id:
            named.setdefault(item.content_id, []).append(index)
    return list(named.values()), [[index] for index, item in items.items() if not item.content_id]
