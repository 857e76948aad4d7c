"""Our tower and graphs in this process, and the same weights in float32 by plain transformers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from bench.engine.towers.answering import Tower
from bench.models import plain
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.plans import Batch
from vitwire_server.preparing import pillow
from vitwire_server.preparing.rules.recipe import recipes_of
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.memory.streams import TORCH_TYPES
from vitwire_server.towers.checkpoints.checkpoint import load_tower, open_checkpoint
from vitwire_server.towers.tower import Tower as AnyTower


class Loaded(NamedTuple):
    """A tower that is ready to encode."""

    tower: AnyTower
    engine: Engine
    plan: Callable[[Sequence[Item]], Sequence[Batch]]
    preprocessing: Mapping[Modality, Preprocessing]
    dtype: DType
    checkpoint: str
    """Its weights."""


class VitwireTower(Tower):
    """A tower driven as the server's engine thread does; `float32` is plain transformers, any other column is ours."""

    def __init__(self, loaded: Loaded) -> None:
        self.device = loaded.tower.device
        self._loaded = loaded
        self._recipes = recipes_of(loaded.preprocessing, loaded.tower.geometry)
        self._float32: Any = None

    def encode(self, column: str, pictures: Sequence[Any]) -> Tensor:
        items = self._items(pictures)
        if column == "float32":
            return self._exact(items)
        rows: dict[int, Tensor] = {}
        for batch in self._loaded.plan(items):
            results = self._launch(items, batch)
            for index, result in zip(batch.items, results, strict=True):
                if isinstance(result, Exception):
                    raise result
                dtype = TORCH_TYPES[result.dtype]
                rows[index] = torch.frombuffer(bytearray(result.data), dtype=dtype).view(result.shape)
        return torch.cat([rows[index] for index in range(len(items))])

    def replayed(
        self,
        column: str,  # noqa: ARG002  # one way only
        pictures: Sequence[Any],
    ) -> tuple[Callable[[], object], Sequence[int]]:
        """Graphs share their inputs: several take the time of the forward, but do not return its rows."""
        items = self._items(pictures)
        batches = self._loaded.plan(items)
        if any(batch.budget is None for batch in batches):
            raise RuntimeError("no graph of this size")
        for batch in batches:
            self._launch(items, batch)
        graphs = [self._loaded.engine._graphs[batch.budget] for batch in batches if batch.budget]
        replay = torch.inference_mode()(lambda: [each.replay() for each in graphs])
        return replay, [each.budget.tokens for each in graphs]

    def call(self, column: str, pictures: Sequence[Any]) -> Callable[[], object]:  # noqa: ARG002  # as above
        items = self._items(pictures)
        batches = self._loaded.plan(items)
        return lambda: [self._launch(items, batch) for batch in batches]

    def _launch(self, items: Sequence[Item], batch: Batch) -> Sequence[Any]:
        return self._loaded.engine.launch([items[i] for i in batch.items], batch.budget).collect().results

    def _items(self, pictures: Sequence[Any]) -> list[Item]:
        """What the server makes of pictures and clips."""
        made = []
        for each in map(np.asarray, pictures):
            modality = Modality.IMAGE if each.ndim == 3 else Modality.VIDEO
            prepared = pillow.prepared(each, self._recipes[modality])
            grid = Grid(*prepared.grid)
            pixels = Pixels(prepared.pixels.tobytes(), DType.UINT8, prepared.pixels.shape)
            made.append(Item(modality, grid, pixels, self._loaded.tower.footprint(grid), self._loaded.dtype))
        return made

    @torch.inference_mode()
    def _exact(self, items: Sequence[Item]) -> Tensor:
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        if self._float32 is None:
            checkpoint = open_checkpoint(self._loaded.checkpoint)
            loaded = load_tower(checkpoint, dtype=torch.float32, device=self.device, track=lambda each, *_: each)
            self._float32 = loaded.tower
        tower = self._float32
        scale = partial(torch.tensor, dtype=torch.float32, device=self.device)
        pixels = []
        for item in items:
            settings = self._loaded.preprocessing[item.modality]
            mean, std = (scale(each).view(-1, 1, 1) for each in (settings.mean, settings.std))
            patches = torch.frombuffer(bytearray(item.pixels.data), dtype=torch.uint8).view(item.pixels.shape)
            frames = patches.to(self.device).float() * settings.rescale_factor
            frames = frames.view(len(patches), len(mean), -1, tower.geometry.patch**2)
            pixels.append(((frames - mean) / std).expand(-1, -1, tower.geometry.temporal, -1).flatten(1))
        return plain(tower, torch.cat(pixels), [item.grid for item in items])
