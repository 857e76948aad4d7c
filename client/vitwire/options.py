"""Options of a model's processor for one image or clip."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from operator import index
from typing import Any, Self

from vitwire._inputs.tensors import invalid

_MOST = 2**63 - 1
_EDGES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
"""Names of the options in `size`."""


@dataclass(frozen=True, slots=True)
class ProcessorOptions:
    """Bounds of the area that an image is resized to, in pixels, and frames of a clip; None: as the checkpoint has it.

    frames: ascending indices of the frames to use of a clip's file.

    `Model.options` names those that a server takes. Raises InvalidItem, naming the field, for values that no server
    takes.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    frames: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, value in self.areas().items():
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST:
                raise invalid(f"options.{name}", "expected a whole number from 1 to 2**63 - 1")
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise invalid("options.max_pixels", f"{self.max_pixels} is less than min_pixels, {self.min_pixels}")
        if self.frames is not None:
            object.__setattr__(self, "frames", _frames(self.frames))

    def areas(self) -> dict[str, int]:
        """The options of images that are not None, by name."""
        return {name: value for name, value in self.given().items() if name != "frames"}

    def given(self) -> dict[str, Any]:
        """The options that are not None, by name."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}

    @classmethod
    def of(cls, options: "ProcessorOptions | Mapping[str, object] | None") -> Self | None:
        """The options by the names of processors, among them `size`, which the others override; None without any.

        Raises InvalidItem, naming the field.
        """
        if options is None:
            return None
        if isinstance(options, cls):
            return options if options.given() else None
        if not isinstance(options, Mapping):
            raise invalid("options", f"expected ProcessorOptions or a mapping, got {type(options).__name__}")
        given = {str(name): value for name, value in options.items() if value is not None}
        size = given.pop("size", None)
        if size is not None:
            if not isinstance(size, Mapping) or size.keys() != _EDGES.keys():
                raise invalid("options.size", f"expected {' and '.join(_EDGES)}, as processors do")
            given = {_EDGES[edge]: value for edge, value in size.items()} | given
        known = [each.name for each in fields(cls)]
        if unknown := given.keys() - known:
            raise invalid(f"options.{min(unknown)[:64]}", f"is unknown: expected {', '.join(known)} or size")
        return cls(**given) if given else None  # type: ignore[arg-type]  # which it checks


def _frames(frames: object) -> tuple[int, ...]:
    """Raises InvalidItem."""
    try:
        found = tuple(index(each) for each in frames)  # type: ignore[attr-defined]  # which raises TypeError
    except TypeError:
        raise invalid("options.frames", "expected whole numbers") from None
    if not found or found[0] < 0 or found[-1] >= 1 << 32 or any(one >= other for one, other in pairwise(found)):
        raise invalid("options.frames", "expected ascending indices from 0 to 2**32 - 1")
    return found
