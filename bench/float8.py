"""A tower of the benchmark in float8, as `serve --precision fp8` computes it."""

from bench.columns import Columns
from bench.stopwatch import Row

from vitwire_server.config.model_flags import DeviceSettings
from vitwire_server.process.computing import reduce_precision
from vitwire_server.runtime.attention.selection import Selection
from vitwire_server.runtime.precision.choosing import Reducible
from vitwire_server.towers.tower import Tower


class Float8:
    """Reduces a tower again and again, each time from bfloat16."""

    def __init__(self, tower: Tower, choice: Selection, columns: Columns) -> None:
        self._tower, self._choice, self._columns = tower, choice, columns
        self._reducible = Reducible(tower.blocks)

    def reduce(self, blocks: str) -> Row:
        """Reduce `all` blocks, whatever is lost, or what a server chooses (`auto`); says what, and what that changes.

        Raises UsageError if no server would start with it.
        """
        for block in self._tower.blocks:
            vars(block).pop("forward", None)  # what fuse() replaced
        self._reducible.reduce(())
        settings = DeviceSettings(precision="fp8", precision_blocks=blocks)
        if blocks == "all":
            settings = settings.model_copy(update={"precision_floor": 0.0})
        reduced = reduce_precision(self._tower, self._columns.stager, self._columns.streams, settings, self._fuse)
        parts = DeviceSettings(precision_blocks=reduced.blocks or "all").precision_parts or ()
        halves = [half for half in self._reducible.sizes if {half, (half.block, "")} & set(parts)]
        return {
            "least": reduced.similarity,
            "median": reduced.median_similarity,
            "blocks": reduced.blocks or "all",
            "share_of_weights": round(self._reducible.share(halves), 3) if reduced.blocks else 1.0,
        }

    def _fuse(self) -> None:
        if self._tower.device.type == "cuda":
            from vitwire_server.runtime.fused.fusing import fuse  # noqa: PLC0415 - triton

            fuse(self._tower.blocks, self._choice)
