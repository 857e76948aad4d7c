"""The engine: owns the device, the tower and its graphs; one thread calls it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitwire_server.core.budgets import Budget
from vitwire_server.core.errors import DeviceLost, EncodeFailed, InvalidTensors, NonFinite, OutOfMemory
from vitwire_server.core.items import Embedding, Item, Pixels
from vitwire_server.core.runner import Collected, Running, Timings
from vitwire_server.runtime.graphs import GraphSet
from vitwire_server.runtime.lanes import TORCH_TYPES, Landing, Lanes, flat
from vitwire_server.runtime.pruning import prune
from vitwire_server.runtime.staging import Stager
from vitwire_server.towers.tower import Metadata, Tower


@dataclass(frozen=True, slots=True)
class Launch:
    """A batch whose forward was started."""

    items: Sequence[Item]
    landing: Landing
    """Rows of each item in the type asked for; `(items,)`: whether all of them are finite; the tokens
    that pruning kept, of one item after the other."""
    stage_in: float
    dtype: torch.dtype
    """What the tower computes in."""

    def collect(self) -> Collected:
        """The rows, once they are on the host. Raises DeviceLost."""
        start = time.perf_counter()
        try:
            execute = self.landing.wait()
        except torch.AcceleratorError as error:
            raise DeviceLost(_first_line(error)) from None
        *rows, finite, kept = self.landing.tensors
        kept_of_each = torch.split(kept, [item.rows if item.keep_ratio else 0 for item in self.items])
        results = [
            _embedding(item, own, tokens) if ok else _non_finite(item, self.dtype)
            for item, own, tokens, ok in zip(self.items, rows, kept_of_each, finite.tolist(), strict=True)
        ]
        return Collected(results, Timings(self.stage_in, execute, time.perf_counter() - start))


@dataclass(frozen=True, slots=True)
class Failed:
    """A batch that could not run; the same failure for each of its items."""

    items: Sequence[Item]
    failure: EncodeFailed

    def collect(self) -> Collected:
        """The failure, item by item."""
        return Collected([self.failure] * len(self.items), None)


@dataclass(frozen=True, slots=True)
class Apart:
    """Items that had to run one by one."""

    parts: Sequence[Running]

    def collect(self) -> Collected:
        """All parts' results in order."""
        collected = [part.collect() for part in self.parts]
        ran = [one.timings for one in collected if one.timings]
        spent = [sum(getattr(each, name) for each in ran) for name in ("stage_in", "execute", "stage_out")]
        results = [result for one in collected for result in one.results]
        return Collected(results, Timings(*spent) if ran else None, ran_separately=True)


class Engine:
    """Runs batches on a tower: replays of its graphs, or eager forwards at the exact shape."""

    def __init__(
        self,
        tower: Tower,
        graphs: GraphSet,
        stager: Stager,
        lanes: Lanes,
        forward: Callable[[Tensor, Metadata], Tensor] | None = None,
    ) -> None:
        """`forward` takes the place of the tower's own in eager batches."""
        self._forward = forward or tower.forward
        self.depth = lanes.depth
        self._tower = tower
        self._graphs = graphs
        self._stager = stager
        self._lanes = lanes

    @torch.inference_mode()
    def launch(self, items: Sequence[Item], budget: Budget | None) -> Running:
        """Stage `items` and start their forward. Raises DeviceLost.

        Out of memory, the cache is emptied and each item is tried alone and eagerly; an item that
        does not fit even so fails with OutOfMemory.
        """
        try:
            return self._launch(items, budget)
        except torch.OutOfMemoryError:
            pass  # the traceback holds the forward's tensors: retry only after it is gone
        except torch.AcceleratorError as error:
            if "out of memory" not in str(error):  # as of pinned memory and of launches
                raise DeviceLost(_first_line(error)) from None
        except RuntimeError as error:
            return Failed(items, EncodeFailed(f"the forward failed: {_first_line(error)}"))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(items) == 1 and budget is None:
            return Failed(items, OutOfMemory("the device has too little memory for this item, even alone"))
        return Apart([self.launch([item], None) for item in items])

    def _launch(self, items: Sequence[Item], budget: Budget | None) -> Launch:
        start = time.perf_counter()
        crops = [item.crops for item in items if item.crops]
        sources = self._lanes.upload([item.pixels for item in items] + crops)
        stage_in = time.perf_counter() - start
        with self._lanes.computing():
            forward = self._replay(items, sources, budget) if budget else self._eager(items, sources)
            parts = self._tower.split(forward, [item.footprint for item in items])
            # Rows leave the static buffer, which the next replay overwrites.
            rows = [part.to(TORCH_TYPES[item.output], copy=True) for item, part in zip(items, parts, strict=True)]
            finite = _all_finite(rows)
            geometry = self._tower.geometry
            rows, kept = prune(items, parts, rows, main=geometry.width // (1 + geometry.levels))
        landing = self._lanes.download([*rows, finite, kept])
        return Launch(items, landing, stage_in, self._tower.dtype)

    def _replay(self, items: Sequence[Item], sources: Sequence[Tensor], budget: Budget) -> Tensor:
        graph = self._graphs[budget]
        graph.load([item.grid for item in items], lambda pixels, crops: self._fill(items, sources, pixels, crops))
        return graph.replay()

    def _eager(self, items: Sequence[Item], sources: Sequence[Tensor]) -> Tensor:
        tower = self._tower
        grids = [item.grid for item in items]
        metadata = tower.reserve(tower.exact(grids))
        tower.prepare(grids, metadata)
        pixels = self._rows(metadata.capacity.patches, tower.geometry.row)
        if tower.geometry.crop_row:
            metadata.crops = self._rows(metadata.capacity.crops, tower.geometry.crop_row)
        self._fill(items, sources, pixels, metadata.crops)
        return self._forward(pixels, metadata)

    def _rows(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=self._tower.dtype, device=self._tower.device)

    def _fill(self, items: Sequence[Item], sources: Sequence[Tensor], pixels: Tensor, crops: Tensor | None) -> None:
        """Write the items' pixels, which are the first of `sources`, and their crops, which are the rest."""
        patches = [item.footprint.patches for item in items]
        for item, source, rows in zip(items, sources[: len(items)], torch.split(pixels, patches), strict=True):
            self._stager.stage(source, item.modality, rows)
        if crops is None:
            return
        twofold = [item for item in items if item.crops]
        views = torch.split(crops, [item.footprint.crops for item in twofold])
        for item, source, rows in zip(twofold, sources[len(items) :], views, strict=True):
            self._stager.stage(source, item.modality, rows, crops=True)


def _all_finite(rows: Sequence[Tensor]) -> Tensor:
    """`(items,)`: whether all elements of each are. NaN is both least and greatest, and one pass finds the two."""
    extremes = [extreme for own in rows for extreme in torch.aminmax(own)]
    return torch.stack(extremes).isfinite().view(-1, 2).all(1)


def _embedding(item: Item, rows: Tensor, kept: Tensor) -> Embedding:
    """Rows on the host as bytes that keep the tensor alive."""
    count, width = rows.shape
    held = rows.view(torch.uint8).numpy().reshape(-1).data
    return Embedding(held, item.output, (count, width), tuple(kept.tolist()))


def _non_finite(item: Item, dtype: torch.dtype) -> NonFinite | InvalidTensors:
    """Whose fault it is that an embedding is not finite: what came in is looked at only here."""
    views = {"pixels": item.pixels, "crops": item.crops}
    wrong = {name: reason for name, view in views.items() if view and (reason := _unfit(view, dtype))}
    if wrong:
        return InvalidTensors(wrong)
    return NonFinite(f"the embedding of this {item.modality} of grid {item.grid} is not finite, though its pixels are")


def _unfit(view: Pixels, dtype: torch.dtype) -> str:
    """Why a tower of `dtype` cannot take these values; empty if it can."""
    extremes = torch.stack(flat(view).aminmax())
    if not extremes.isfinite().all():
        return "holds NaN or infinity"
    if not extremes.to(dtype).isfinite().all():
        return f"holds values beyond the range of {str(dtype).removeprefix('torch.')}, which the model computes in"
    return ""


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
