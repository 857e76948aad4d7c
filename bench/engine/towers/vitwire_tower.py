"""Our tower and graphs in this process, and the same weights in float32 by plain transformers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from bench.engine.towers.answering import Tower
from bench.models import plain, preprocessing
from bench.tower_times import Ran
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.preparing import pillow
from vitwire_server.preparing.rules.recipe import recipes_of
from vitwire_server.towers.checkpoints.checkpoint import load_tower, open_checkpoint
from vitwire_server.towers.tower import Tower as AnyTower


class VitwireTower(Tower):
    """A tower driven as the server's engine thread does; `float32` is plain transformers, any other column is ours."""

    def __init__(self, tower: AnyTower, ran: Ran, checkpoint: str) -> None:
        """`ran` is its engine, and `checkpoint` has its weights."""
        self.device = tower.device
        self.checkpoint = checkpoint
        self._tower, self._ran = tower, ran
        self._recipes = recipes_of(preprocessing(), tower.geometry)
        self._float32: Any = None

    def encode(self, column: str, pictures: Sequence[Any]) -> Tensor:
        items = self._items(pictures)
        return self._exact(items) if column == "float32" else self._ran.rows(items)

    def replayed(self, column: str, pictures: Sequence[Any]) -> Callable[[], object]:  # noqa: ARG002  # one way only
        if replay := self._ran.replay(self._items(pictures)):
            return replay
        raise RuntimeError("no graph of this size")

    def call(self, column: str, pictures: Sequence[Any]) -> Callable[[], object]:  # noqa: ARG002  # as above
        return partial(self._ran.results, self._items(pictures))

    def _items(self, pictures: Sequence[Any]) -> list[Item]:
        """What the server makes of pictures and clips."""
        made = []
        for each in map(np.asarray, pictures):
            modality = Modality.IMAGE if each.ndim == 3 else Modality.VIDEO
            prepared = pillow.prepared(each, self._recipes[modality])
            grid = Grid(*prepared.grid)
            pixels = Pixels(prepared.pixels.tobytes(), DType.UINT8, prepared.pixels.shape)
            made.append(Item(modality, grid, pixels, self._tower.footprint(grid), DType.BFLOAT16))
        return made

    @torch.inference_mode()
    def _exact(self, items: Sequence[Item]) -> Tensor:
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        if self._float32 is None:
            checkpoint = open_checkpoint(self.checkpoint)
            loaded = load_tower(checkpoint, dtype=torch.float32, device=self.device)
            self._float32 = loaded.tower
        tower = self._float32
        scale = partial(torch.tensor, dtype=torch.float32, device=self.device)
        pixels = []
        for item in items:
            settings = preprocessing()[item.modality]
            mean, std = (scale(each).view(-1, 1, 1) for each in (settings.mean, settings.std))
            patches = torch.frombuffer(bytearray(item.pixels.data), dtype=torch.uint8).view(item.pixels.shape)
            frames = patches.to(self.device).float() * settings.rescale_factor
            frames = frames.view(len(patches), len(mean), -1, tower.geometry.patch**2)
            pixels.append(((frames - mean) / std).expand(-1, -1, tower.geometry.temporal, -1).flatten(1))
        return plain(tower, torch.cat(pixels), [item.grid for item in items])
