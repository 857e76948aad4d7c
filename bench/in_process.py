"""The bare tower: the engine and planner of a server in the process that calls them, without a service."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
from bench.callers import Row, Threads, Work

from vitwire_server.assembling.loading import load_model
from vitwire_server.config.settings import ServeSettings
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.observe.metrics import Metrics


class Tower(Threads):
    """Encodes images as the engine of a server with these settings does; one call at a time."""

    def __init__(self, model: str, **settings: Any) -> None:
        self._loaded = load_model(ServeSettings(model=model, **{"budgets": "auto", **settings}), Metrics())

    def prepare(self, work: Work) -> Row:
        drawn = [
            [self._image(work, work.images * seed + i) for i in range(work.images)] for seed in range(work.distinct)
        ]
        self._drawn, items = cycle(drawn), drawn[0]
        self.encode(())
        tokens = sum(item.rows for item in items)
        down = tokens * self._loaded.card.geometry.width * items[0].output.size
        return {"up": sum(item.nbytes for item in items), "down": down, "tokens": tokens, "answer": []}

    def encode(self, items: Sequence[Any]) -> Sequence[Any]:
        """The next of the engine's own items in place of the client's; returns nothing. Raises the failure of one."""
        items = next(self._drawn)
        for batch in self._loaded.planner.plan([item.footprint for item in items]).batches:
            for result in self._launched([items[i] for i in batch.items], batch.budget):
                if isinstance(result, Exception):
                    raise result
        return ()

    def _launched(self, items: Sequence[Item], budget: Any) -> Sequence[object]:
        return self._loaded.engine.launch(items, budget).collect().results

    def _image(self, work: Work, seed: int) -> Item:
        card = self._loaded.card
        geometry = card.geometry
        patches = max(1, work.side // (geometry.patch * geometry.merge)) * geometry.merge
        grid = Grid(1, patches, patches)
        frames = 1 if work.pixels == "uint8" else geometry.temporal
        shape = (grid.patches, geometry.columns(frames=frames))
        rng = np.random.default_rng(seed)
        if work.pixels == "uint8":
            drawn = rng.integers(0, 256, shape, dtype=np.uint8)
        else:
            drawn = rng.standard_normal(shape, dtype=np.float32).astype(work.pixels)
        pixels = Pixels(drawn.tobytes(), DType.of(work.pixels), shape)
        return Item(Modality.IMAGE, grid, pixels, self._loaded.tower.footprint(grid), card.dtype)
