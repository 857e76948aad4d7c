"""Patches in raster order whose tower is followed by a resampler: as many rows of an image as there are queries."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property
from math import isqrt
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
from vitwire_server.towers.metadata import Kind
from vitwire_server.towers.shared.resampler import LONGEST_SIDE, Resampler


class QueriedTower(RasterTower):
    """A resampler makes `queries` rows of an image, which are known before the tower is. Budgets count patches."""

    def __init__(self, family: RasterFamily, parts: Parts, config: Config, *, queries: int) -> None:
        self._queries = queries
        super().__init__(family, parts, config)

    def _geometry(self, config: Config) -> Geometry:
        return ResampledGeometry(**asdict(super()._geometry(config)), queries=self._queries)

    @cached_property
    def footprints(self) -> Footprints:  # type: ignore[override]  # of another class than other patches'
        """See Tower."""
        return ResampledFootprints(self._queries)

    @property
    def capacities(self) -> Capacities:
        """See Tower."""
        return ResampledCapacities(self._queries)

    def sizes(self, most: int) -> list[int]:
        """See Tower."""
        return [tokens for tokens in super().sizes(most) if tokens >= self._queries]

    def samples(self, tokens: int, items: int) -> list[Grid]:
        """See RasterTower. None has fewer patches than queries, so one of few tokens is larger than asked for."""
        queries = self._queries
        least = isqrt(queries - 1) + 1
        return [grid for grid in super().samples(tokens, items) if grid.patches >= queries] or [Grid(1, least, least)]


class ResampledTower(QueriedTower):
    """Its family names the resampler among the modules beside the tower."""

    def __init__(self, family: RasterFamily, parts: Parts, config: Config) -> None:
        self._resampler: Resampler = parts["resampler"]
        super().__init__(family, parts, config, queries=self._resampler.queries)

    def _geometry(self, config: Config) -> Geometry:
        return replace(super()._geometry(config), longest_side=LONGEST_SIDE)

    @property
    def resampler_heads(self) -> tuple[int, int]:
        """See Tower."""
        return self._resampler.heads

    def _inputs(self) -> dict[str, Kind]:
        return self._resampler.inputs()

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        return {**super()._compute(grid), **self._resampler.compute(grid)}

    def _resampled(self, states: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        """`states (patches, C)` to rows `(tokens, width)`; computes no more of them than the segments can have."""
        tokens, slots = len(tensors["picked"]), len(tensors["cu_seqlens"]) - 1
        most = min(tokens, slots * self._resampler.queries)
        implementation = self.model.config._attn_implementation  # noqa: SLF001 - set by use_attention

        def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            heads_first = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
            rows, _ = ALL_ATTENTION_FUNCTIONS[implementation](
                self._resampler, *heads_first, None, scaling=scale, dropout=0.0, is_causal=False, **attended
            )
            return rows[0]  # type: ignore[no-any-return]

        rows = self._resampler(states, tensors["places"], tensors["query_index"], tensors["picked"][:most, 0], attend)
        return functional.pad(rows, (0, 0, 0, tokens - most))
