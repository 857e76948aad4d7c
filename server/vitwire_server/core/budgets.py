"""Budgets, the capacities of captured graphs, and ladders of them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from vitwire_server.core.grids import Footprint

_FEWEST_SEGMENTS = 8
_TOKENS_PER_SEGMENT = 16
_LONGEST = 8192
_FEWEST_SHORT = 2


@dataclass(frozen=True, slots=True, order=True)
class Budget:
    """Capacity of one captured graph; ordered by cost, that is by tokens, then by the longest segment."""

    tokens: int
    max_segment_patches: int
    """Maximum length of an attention segment, in patches: the static `max_seqlen`."""
    max_items: int
    max_segments: int
    """Attention segments of real items; padding has separate segments."""
    max_crops: int = 0
    """Rows of crops, in towers that take them; their tokens are among `tokens`."""

    def __post_init__(self) -> None:
        if min(self.tokens, self.max_items, self.max_segments, self.max_segment_patches) < 1:
            raise ValueError(f"every capacity of a budget must be positive: {self}")

    def fits(self, load: Footprint, items: int) -> bool:
        """Whether `items` items with the summed footprint `load` fit."""
        return (
            load.tokens <= self.tokens
            and items <= self.max_items
            and load.segments <= self.max_segments
            and load.longest <= self.max_segment_patches
            and load.crops <= self.max_crops
        )

    def within(self, other: "Budget") -> "Budget":
        """This budget with at most the items and segments of another."""
        items, segments = min(self.max_items, other.max_items), min(self.max_segments, other.max_segments)
        return replace(self, max_items=items, max_segments=segments)


@dataclass(frozen=True)
class Ladder:
    """Budgets in ascending order; empty when no graph is captured.

    Among budgets of equal tokens, the last holds the longest segments; the others hold short ones only, faster.
    """

    budgets: tuple[Budget, ...] = ()

    def __post_init__(self) -> None:
        kinds = [(budget.tokens, budget.max_segment_patches) for budget in self.budgets]
        if kinds != sorted(set(kinds)):
            raise ValueError(f"budgets must ascend strictly in tokens and longest segments, got {kinds}")

    def __iter__(self) -> Iterator[Budget]:
        return iter(self.budgets)

    def __len__(self) -> int:
        return len(self.budgets)

    @cached_property
    def largest(self) -> Budget | None:
        """The budget of most tokens and longest segments, None on an empty ladder."""
        return self.budgets[-1] if self.budgets else None

    def smallest_fitting(self, load: Footprint, items: int) -> Budget | None:
        """The cheapest budget that fits `items` items with the summed footprint `load`, if any."""
        return next((budget for budget in self.budgets if budget.fits(load, items)), None)


def budget(tokens: int, *, merge: int, max_items: int, max_frames: int) -> Budget:
    """A budget of `tokens` with default limits for its size.

    A segment may fill the whole budget, so that one large image fits, up to a size at which attention alone keeps the
    device busy (docs/performance/tower.md); `with_longer` adds the others. Empty slots cost time in attention
    kernels, so there is one slot per 16 tokens, and at least eight.
    """
    segments = min(max_frames, max(_FEWEST_SEGMENTS, tokens // _TOKENS_PER_SEGMENT))
    return Budget(
        tokens=tokens,
        max_items=max(1, min(max_items, tokens, segments)),
        max_segments=segments,
        max_segment_patches=min(tokens * merge * merge, _LONGEST),
    )


def with_longer(ladder: Ladder, *, merge: int) -> Ladder:
    """The ladder, and budgets of as many tokens whose one segment may be as long as the whole budget."""
    added = {
        replace(budget, max_segment_patches=budget.tokens * merge * merge)
        for budget in ladder
        if budget.max_segment_patches == _LONGEST < budget.tokens * merge * merge
    }
    return Ladder(tuple(sorted({*ladder, *added})))


def with_shorter(ladder: Ladder, shorter: Callable[[int], Iterable[int]], *, merge: int) -> Ladder:
    """The ladder, and budgets of as many tokens for short segments that can be attended in a faster way.

    `shorter` has the lengths below a budget's longest segment at which they can. A budget for short segments holds at
    least two of the longest. Next to it, the budget for longer ones has a slot for each segment that is longer, and at
    least eight.
    """
    budgets = set()
    for budget in ladder:
        patches, slots = budget.tokens * merge * merge, budget.max_segments
        for longest in sorted(each for each in shorter(budget.max_segment_patches) if patches >= _FEWEST_SHORT * each):
            budgets.add(_with_slots(replace(budget, max_segment_patches=longest), slots))
            slots = min(slots, max(_FEWEST_SEGMENTS, patches // longest))
        budgets.add(_with_slots(budget, slots))
    return Ladder(tuple(sorted(budgets)))


def _with_slots(budget: Budget, slots: int) -> Budget:
    return replace(budget, max_items=min(budget.max_items, slots), max_segments=slots)


def default_tokens(max_tokens: int) -> list[int]:
    """Budget sizes from 16 to `max_tokens` in steps of about 1.25.

    A geometric ladder limits padding to a quarter; sizes are multiples of 8, which keeps rows aligned for matrix units.
    """
    sizes = [min(16, max_tokens)]
    while sizes[-1] < max_tokens:
        step = max(sizes[-1] + 8, int(sizes[-1] * 1.25) // 8 * 8)
        sizes.append(min(step, max_tokens))
    return sizes
