"""Patches in raster order whose tower is followed by a resampler: as many rows of an image as there are queries."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vitwire_server.core.capacities import Capacities, ResampledCapacities
from vitwire_server.core.footprints import Footprints, ResampledFootprints
from vitwire_server.core.geometries import ResampledGeometry
from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Geometry
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Parts
from vitwire_server.towers.layouts.raster import RasterFamily, RasterTower
from vitwire_server.towers.metadata import Capacity, Kind
from vitwire_server.towers.shared.resampler import LONGEST_SIDE, Resampler


class QueriedTower(RasterTower):
    """A resampler makes `queries` rows of each segment, which are known before the tower is. Budgets count patches."""

    def __init__(self, family: RasterFamily, parts: Parts, config: Config, *, queries: int) -> None:
        self._queries = queries
        super().__init__(family, parts, config)

    def _geometry(self, config: Config) -> Geometry:
        return ResampledGeometry(**asdict(super()._geometry(config)))

    @cached_property
    def footprints(self) -> Footprints:  # type: ignore[override]  # of another class than other patches'
        return ResampledFootprints(self._queries)

    @property
    def capacities(self) -> Capacities:
        return ResampledCapacities(self._queries)

    def sizes(self, most: int) -> list[int]:
        return [tokens for tokens in super().sizes(most) if tokens >= self._queries]

    def rows(self, capacity: Capacity) -> int:
        return capacity.segments * self._queries


class ResampledTower(QueriedTower):
    """Its family names the resampler among the modules beside the tower."""

    def __init__(self, family: RasterFamily, parts: Parts, config: Config) -> None:
        self._resampler: Resampler = parts["resampler"]
        super().__init__(family, parts, config, queries=self._resampler.queries)

    def _geometry(self, config: Config) -> Geometry:
        return replace(super()._geometry(config), longest_side=LONGEST_SIDE)

    @property
    def resampler_heads(self) -> tuple[int, int]:
        return self._resampler.heads

    def _inputs(self) -> dict[str, Kind]:
        return self._resampler.inputs()

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        return {**super()._compute(grid), **self._resampler.compute(grid)}

    def _resampled(self, states: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        """`states (patches, C)` to rows `(segments * queries, width)`; slots without a segment have no queries."""
        boundaries, queries = tensors["cu_seqlens"], self._resampler.queries
        used = boundaries.diff() > 0
        ends = functional.pad(used.cumsum(0, dtype=boundaries.dtype) * queries, (1, 0))
        crossed = {**attended, "cu_seq_lens_q": ends, "max_length_q": queries}
        implementation = self.model.config._attn_implementation  # noqa: SLF001 - set by use_attention

        def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            heads_first = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
            rows, _ = ALL_ATTENTION_FUNCTIONS[implementation](
                self._resampler, *heads_first, None, scaling=scale, dropout=0.0, is_causal=False, **crossed
            )
            return rows[0]  # type: ignore[no-any-return]

        rows: Tensor = self._resampler(states, tensors["places"], len(used), attend)
        return rows
