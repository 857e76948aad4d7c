"""The engine: runs batches on the device. Used on the engine thread only, once the model is loaded."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, repeat

import torch
from torch import Tensor

from vitwire_server.core.budgets import Budget
from vitwire_server.core.errors import DeviceLost, EncodeFailed, InvalidTensors, NonFinite, OutOfMemory
from vitwire_server.core.items import DType, Embedding, Item, Modality, Pixels
from vitwire_server.core.runner import Collected, Running, Timings
from vitwire_server.preparing.device.resizing import Job, prepare
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.runtime.graphs import GraphSet
from vitwire_server.runtime.memory.outbox import DeviceRows, Outbox
from vitwire_server.runtime.memory.streams import TORCH_TYPES, Download, Streams, flat
from vitwire_server.runtime.staging import Stager, copied_and_checked, prune
from vitwire_server.towers.tower import Tower


@dataclass(frozen=True, slots=True)
class Launch:
    """A batch in flight on the device."""

    items: Sequence[Item]
    download: Download
    """The rows of each item that does not leave from the outbox, in its output type; `(tokens,)` whether each row that
    was computed is finite; the tokens that pruning kept, concatenated."""
    stage_in: float
    dtype: torch.dtype
    shapes: Sequence[tuple[int, ...]]
    """`(rows, width)` of each item."""
    outgoing: Sequence[DeviceRows | None]
    """The rows of each item in the outbox, which are not copied to the host; None for rows that are."""

    def collect(self) -> Collected:
        """Wait for the batch, and for rows that go to the host. Raises DeviceLost."""
        start = time.perf_counter()
        try:
            execute, preparing = self.download.wait()
        except torch.AcceleratorError as error:
            raise DeviceLost(_first_line(error)) from None
        finite, kept = self.download.checks
        on_host = iter(self.download.rows)
        data = [memoryview(b"") if outgoing else next(on_host) for outgoing in self.outgoing]
        results = [
            Embedding(own, item.output, (shape[0], shape[1]), tokens, outgoing)
            if is_finite
            else _non_finite(item, self.dtype)
            for item, own, shape, tokens, is_finite, outgoing in zip(
                self.items, data, self.shapes, self._kept(kept), self._finite(finite), self.outgoing, strict=True
            )
        ]
        return Collected(results, Timings(self.stage_in, execute, time.perf_counter() - start, preparing))

    def _kept(self, kept: Tensor) -> Sequence[tuple[int, ...]]:
        """The tokens that pruning kept of each item; nearly all batches are without pruning."""
        if not len(kept):
            return [()] * len(self.items)
        counts = [item.rows if item.keep_ratio else 0 for item in self.items]
        return [tuple(tokens.tolist()) for tokens in kept.split(counts)]

    def _finite(self, finite: Tensor) -> Sequence[bool]:
        """Whether all rows of each item are finite; nearly always all of the batch are."""
        if finite.numpy().all():
            return [True] * len(self.items)
        return [bool(rows.all()) for rows in finite.split([item.footprint.rows for item in self.items])]


@dataclass(frozen=True, slots=True)
class Failed:
    """A batch that could not run, with one failure for all its items."""

    items: Sequence[Item]
    failure: EncodeFailed

    def collect(self) -> Collected:
        """The failure for each item."""
        return Collected([self.failure] * len(self.items), None)


@dataclass(frozen=True, slots=True)
class Separately:
    """Items of a batch that are run one by one, as the batch ran out of memory."""

    parts: Sequence[Running]

    def collect(self) -> Collected:
        """The results of all items in order, with summed timings."""
        collected = [part.collect() for part in self.parts]
        ran = [one.timings for one in collected if one.timings]
        spent = [sum(getattr(each, name) for each in ran) for name in ("stage_in", "execute", "stage_out", "prepare")]
        results = [result for one in collected for result in one.results]
        return Collected(results, Timings(*spent) if ran else None, ran_separately=True)


class Engine:
    """Runs batches on a tower, by replaying its graphs or by eager forwards at the exact shape."""

    def __init__(
        self,
        tower: Tower,
        graphs: GraphSet,
        stager: Stager,
        streams: Streams,
        outbox: Outbox | None = None,
        recipes: Mapping[Modality, Recipe] | None = None,
    ) -> None:
        """`outbox` is where rows are delivered from.

        Pictures are prepared by `recipes`; without them, no item may be a picture.
        """
        self.depth = streams.depth
        self._tower = tower
        self._dtype = tower.dtype  # to ask for it takes a walk over the modules
        self._graphs = graphs
        self._stager = stager
        self._streams = streams
        self._outbox = outbox
        self._recipes = recipes or {}

    @torch.inference_mode()
    def launch(self, items: Sequence[Item], budget: Budget | None) -> Running:
        """Stage `items` and start their forward. Raises DeviceLost.

        When memory runs out, the allocator's cache is freed and each item runs alone and eagerly; an item that still
        does not fit fails with OutOfMemory.
        """
        try:
            return self._launch(items, budget)
        except torch.OutOfMemoryError:
            pass  # retry outside of this block: the traceback keeps the forward's tensors alive
        except torch.AcceleratorError as error:
            if "out of memory" not in str(error):  # from pinned memory or launches
                raise DeviceLost(_first_line(error)) from None
        except (RuntimeError, ValueError) as error:
            return Failed(items, EncodeFailed(f"the forward failed: {_first_line(error)}"))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(items) == 1 and budget is None:
            return Failed(items, OutOfMemory("the device does not have enough memory for this item"))
        return Separately([self.launch([item], None) for item in items])

    def _launch(self, items: Sequence[Item], budget: Budget | None) -> Launch:
        start = time.perf_counter()
        groups = self._groups(items)
        crops = [[item.crops] for item in items if item.crops]
        sources = self._streams.upload([[item.pixels for item in group] for group in groups] + crops)
        stage_in = time.perf_counter() - start
        with self._streams.computing():
            staged = Staged(groups, sources[: len(groups)], sources[len(groups) :])
            forward = self._replay(items, staged, budget) if budget else self._eager(items, staged)
            rows, finite, kept = self._finish(items, forward)
            outgoing = self._outgoing(items, rows)
        staying = [own for own, leaves in zip(rows, outgoing, strict=True) if not leaves]
        download = self._streams.download(staying, [finite, kept])
        return Launch(items, download, stage_in, self._dtype, [own.shape for own in rows], outgoing)

    def _outgoing(self, items: Sequence[Item], rows: Sequence[Tensor]) -> Sequence[DeviceRows | None]:
        """The rows of each item in the outbox; None if they go to the host."""
        outbox = self._outbox
        if outbox is None:
            return [None] * len(items)
        return outbox.copies([own if outbox.takes(item) else None for item, own in zip(items, rows, strict=True)])

    def _groups(self, items: Sequence[Item]) -> list[list[Item]]:
        """Neighbours whose pixels are staged in the same way, together where the streams join them."""
        if not self._streams.joins:
            return [[item] for item in items]
        return [list(group) for _, group in groupby(items, key=_form)]

    def _finish(self, items: Sequence[Item], forward: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Rows of each item in its output type, whether each token is finite, and the tokens that pruning kept.

        Rows are copied, as the next replay overwrites the static output; in one piece where items agree.
        """
        geometry = self._tower.geometry
        footprints = [item.footprint for item in items]
        outputs = {item.output for item in items}
        if self._streams.joins and len(outputs) == 1 and not any(item.keep_ratio for item in items):
            tokens = sum(footprint.rows for footprint in footprints)
            (joint,), finite = copied_and_checked([forward[:tokens]], [TORCH_TYPES[outputs.pop()]])
            none_kept = torch.empty(0, dtype=torch.int64, device=joint.device)
            return self._tower.split(joint, footprints), finite, none_kept
        parts = self._tower.split(forward, footprints)
        rows, finite = copied_and_checked(parts, [TORCH_TYPES[item.output] for item in items])
        rows, kept = prune(items, parts, rows, main=geometry.width // (1 + geometry.levels))
        return rows, finite, kept

    def _replay(self, items: Sequence[Item], staged: "Staged", budget: Budget) -> Tensor:
        graph = self._graphs[budget]
        graph.load([item.grid for item in items], lambda pixels, crops: self._fill(staged, pixels, crops))
        return graph.replay()

    def _eager(self, items: Sequence[Item], staged: "Staged") -> Tensor:
        tower = self._tower
        grids = [item.grid for item in items]
        metadata = tower.reserve(tower.exact(grids))
        tower.prepare(grids, metadata)
        pixels = self._rows(metadata.capacity.patches, tower.geometry.row)
        if tower.geometry.crop_row:
            metadata.crops = self._rows(metadata.capacity.crops, tower.geometry.crop_row)
        self._fill(staged, pixels, metadata.crops)
        return tower.forward(pixels, metadata)

    def _rows(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=self._dtype, device=self._tower.device)

    def _fill(self, staged: "Staged", pixels: Tensor, crops: Tensor | None) -> None:
        """Write pixels and crops into the tower's inputs."""
        items = [item for group in staged.groups for item in group]
        of_crops = torch.split(crops, [item.footprint.crops for item in items]) if crops is not None else repeat(None)
        views, sources = iter(of_crops), iter(staged.crops)
        patches = [sum(item.footprint.patches for item in group) for group in staged.groups]
        pictures = []
        for group, source, rows in zip(staged.groups, staged.pixels, torch.split(pixels, patches), strict=True):
            if group[0].is_picture:
                pictures.append(self._job(group[0], source, rows, next(views)))
                continue
            self._stager.stage(source, group[0].modality, rows)
            for item, target in zip(group, views, strict=False):
                if item.crops and target is not None:
                    self._stager.stage(next(sources), item.modality, target, crops=True)
        if pictures:
            with self._streams.preparing():
                prepare(pictures)

    def _job(self, item: Item, source: Tensor, pixels: Tensor, crops: Tensor | None) -> Job:
        """The job that prepares the flat picture of an item into its rows of the tower's inputs."""
        recipe = self._recipes[item.modality].within(item.areas)
        if item.in_groups:  # a part has fewer frames than the clip that its size follows from
            recipe = replace(recipe, size=(item.grid.h * recipe.patch, item.grid.w * recipe.patch))
        return Job(source.view(item.pixels.shape), recipe, pixels, crops if crops is not None and len(crops) else None)


@dataclass(frozen=True, slots=True)
class Staged:
    """The pixels of a batch on the device."""

    groups: Sequence[Sequence[Item]]
    pixels: Sequence[Tensor]
    """One per group, in order."""
    crops: Sequence[Tensor]
    """One per item with crops, in order."""


def _form(item: Item) -> tuple[Modality, DType, tuple[int, ...], int]:
    """The key of staging: items with equal keys are staged as one; a picture always alone."""
    return item.modality, item.pixels.dtype, item.pixels.shape[1:], id(item) if item.is_picture else 0


def _non_finite(item: Item, dtype: torch.dtype) -> NonFinite | InvalidTensors:
    """The error for an embedding that is not finite: InvalidTensors if the input is to blame."""
    views = {"pixels": item.pixels, "crops": item.crops}
    wrong = {name: reason for name, view in views.items() if view and (reason := _input_fault(view, dtype))}
    if wrong:
        return InvalidTensors(wrong)
    return NonFinite(
        f"the embedding of this {item.modality} with grid {item.grid} is not finite, though its pixels are"
    )


def _input_fault(view: Pixels, dtype: torch.dtype) -> str:
    """Why a tower of `dtype` cannot encode these values; empty if it can."""
    extremes = torch.stack(flat(view).aminmax())
    if not extremes.isfinite().all():
        return "holds NaN or infinity"
    if not extremes.to(dtype).isfinite().all():
        return f"holds values beyond the range of {str(dtype).removeprefix('torch.')}, which the model computes in"
    return ""


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
