"""Packed towers without `grid_thw`: images of any size as patches in raster order, positions of our own."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Geometry, Preprocessing
from vitwire_server.towers.family import Parts, at
from vitwire_server.towers.metadata import Rows, Sources
from vitwire_server.towers.layouts.patches import PatchFamily, PatchTower, neighbours
from vitwire_server.towers.processors.settings import Processor, read_settings
from vitwire_server.towers.tower import Metadata

_SQUARE = 16
"""Tokens a side of the images that budgets are sampled with."""


@dataclass(frozen=True, kw_only=True)
class NavitFamily(PatchFamily):
    """Rows whose tower is a NavitTower."""

    adapter: "type[NavitTower]"
    """What computes the tower's forward."""
    merge: str | None = None
    """Path of the field with the root of a token's patches, in the whole configuration; None for one patch a token."""
    channels_last: bool = False
    """The processor emits the columns of a patch as (p, p, C)."""
    processor: Callable[[Processor, Any], dict[Modality, Preprocessing]]
    """From the processor's files and the checkpoint's configuration; raises what `read_settings` tells of."""
    layout = "packed patches, raster order"

    def build(self, parts: Parts, config: Any) -> "NavitTower":  # noqa: ANN401
        """See Family."""
        return self.adapter(self, parts, config)

    def preprocessing(self, folder: Path, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
        """See Family."""
        return read_settings(folder, lambda files: self.processor(files, config), converts=self.converts)


class NavitTower(PatchTower):
    """Attention within images; what a family's stock forward derives from image sizes is laid out ahead."""

    def __init__(self, family: NavitFamily, parts: Parts, config: Any) -> None:  # noqa: ANN401
        """`config` is the whole checkpoint's."""
        super().__init__(family, parts)
        vision: Any = self.model.config
        self.geometry = Geometry(
            patch=vision.patch_size,
            merge=1 if family.merge is None else at(config, family.merge),
            temporal=1,
            channels=getattr(vision, "num_channels", 3),
            width=at(config, family.width),
            levels=0,
            raster=True,
            channels_last=family.channels_last,
        )
        self._projector: Any = parts.get("projector")

    @property
    def heads(self) -> tuple[int, int]:
        """See Tower."""
        config: Any = self.model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_attention_heads, size

    def samples(self, tokens: int, items: int) -> list[Grid]:
        """At most `items` images, nearly square, of `tokens` together, or of a few less than that."""
        merge, longest = self.geometry.merge, self.geometry.longest_side
        squares = min(tokens // _SQUARE**2, items - 1)
        rest = tokens - squares * _SQUARE**2
        rows = next((n for n in range(isqrt(rest), 0, -1) if rest % n == 0), 0)
        columns = rest // rows if rows else 0
        if longest is not None and columns * merge > longest:
            rows = columns = isqrt(rest)
        shapes = [(_SQUARE, _SQUARE)] * squares + [(rows, columns)] * bool(rest)
        return [Grid(1, height * merge, width * merge) for height, width in shapes]

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        """`pixels (patches, columns)` to rows `(tokens, width)`."""
        tensors = metadata.tensors
        boundaries, longest = tensors["cu_seqlens"], metadata.bounds["max_seqlen"]
        attended = {
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": longest,
            "max_length_k": longest,
        }
        return self._rows(pixels, tensors, attended)

    @abstractmethod
    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        """Rows `(tokens, width)`; `attended` are the keyword arguments of packed attention."""


class PixtralTower(NavitTower):
    """Rotary positions by row and column; in Mistral 3, a learned merger of neighbours before the projector."""

    def __init__(self, family: NavitFamily, parts: Parts, config: Any) -> None:  # noqa: ANN401
        super().__init__(family, parts, config)
        self._kinds["positions"] = Rows((2,), torch.int64)
        if self.geometry.merge > 1:
            self._kinds["neighbours"] = Sources(self.geometry.merge**2)

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        computed = {**super()._compute(grid), "positions": places(grid)}
        if self.geometry.merge > 1:
            computed["neighbours"] = neighbours(grid, self.geometry.merge)
        return computed

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        model, side = self.model, self.geometry.patch
        patches = model.patch_conv(pixels.view(len(pixels), -1, side, side)).flatten(1)
        states = model.ln_pre(patches.unsqueeze(0))
        turns = model.patch_positional_embedding(states, tensors["positions"])
        states = model.transformer(states, attention_mask=None, position_embeddings=turns, **attended).last_hidden_state
        if self.geometry.merge == 1:
            return self._projector(states[0])  # type: ignore[no-any-return]
        return self._merged(states[0], tensors["neighbours"])

    def _merged(self, states: Tensor, neighbours: Tensor) -> Tensor:
        """Of a token's columns, those of all its patches lie side by side."""
        projector = self._projector
        beside = projector.norm(states)[neighbours].transpose(1, 2).flatten(1)
        hidden = projector.act(projector.linear_1(projector.patch_merger.merging_layer(beside)))
        return projector.linear_2(hidden)  # type: ignore[no-any-return]


class Gemma4Tower(NavitTower):
    """Learned and rotary positions by column and row; tokens are means of squares of patches."""

    def __init__(self, family: NavitFamily, parts: Parts, config: Any) -> None:  # noqa: ANN401
        super().__init__(family, parts, config)
        merge = self.geometry.merge
        self.geometry = replace(self.geometry, longest_side=self.model.config.position_embedding_size // merge * merge)
        self._kinds |= {"positions": Rows((2,), torch.int64), "squares": Sources(merge**2)}
        self._clear = torch.zeros(1, 1, dtype=torch.bool, device=self.device)
        """No patch is padding in the stock sense: what pads a budget has rows that nobody reads."""

    def to(self, device: torch.device | str) -> None:
        """See Tower."""
        super().to(device)
        self._clear = self._clear.to(device)

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        squares = neighbours(grid, self.geometry.merge)
        return {**super()._compute(grid), "positions": places(grid).flip(1), "squares": squares}

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        model, positions = self.model, tensors["positions"].unsqueeze(0)
        states = model.patch_embedder(pixels.unsqueeze(0), positions, self._clear)
        turns = model.encoder.rotary_emb(states, positions)
        for layer in model.encoder.layers:
            states = layer(states, position_embeddings=turns, position_ids=positions, **attended)
        return self._projector(self._pooled(states[0], tensors["squares"]))  # type: ignore[no-any-return]

    def _pooled(self, states: Tensor, squares: Tensor) -> Tensor:
        """Means in float32, scaled; float16 would overflow."""
        model = self.model
        means = states[squares].float().mean(dim=1).to(states.dtype)
        rows: Tensor = means.float() * model.pooler.root_hidden_size
        if model.config.standardize:
            rows = (rows - model.std_bias.float()) * model.std_scale.float()
        return rows.to(states.dtype)


class Siglip2Tower(NavitTower):
    """Learned positions, resampled to each grid; rows of the patches after the last norm."""

    def __init__(self, family: NavitFamily, parts: Parts, config: Any) -> None:  # noqa: ANN401
        super().__init__(family, parts, config)
        self._table = self.model.embeddings.position_embedding.weight.detach().cpu()
        self._kinds["positions"] = Rows((self._table.shape[1],), self._table.dtype)

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        """Resampled on the host, in float32."""
        embeddings = self.model.embeddings
        side = embeddings.position_embedding_size
        resampled = embeddings.resize_positional_embeddings(
            self._table.view(side, side, -1), torch.tensor([[grid.h, grid.w]]), grid.frame_patches
        )
        return {**super()._compute(grid), "positions": resampled[0].repeat(grid.t, 1)}

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        model = self.model
        states = (model.embeddings.patch_embedding(pixels) + tensors["positions"]).unsqueeze(0)
        for layer in model.encoder.layers:
            states = states + self._attention(layer.self_attn, layer.layer_norm1(states), attended)
            states = states + layer.mlp(layer.layer_norm2(states))
        rows: Tensor = model.post_layernorm(states[0])
        return rows

    def _attention(self, module: Any, states: Tensor, attended: Mapping[str, Any]) -> Tensor:  # noqa: ANN401
        """The stock module keeps the boundaries from attention, so its projections are called one by one."""
        attend = ALL_ATTENTION_FUNCTIONS[self.model.config._attn_implementation]  # noqa: SLF001 - set by use_attention
        query, key, value = (
            projection(states).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        )
        rows, _ = attend(
            module, query, key, value, None, scaling=module.scale, dropout=0.0, is_causal=False, **attended
        )
        return module.out_proj(rows.flatten(2))  # type: ignore[no-any-return]


def places(grid: Grid) -> Tensor:
    """Row and column of each patch, `(patches, 2)`, frame after frame."""
    rows = torch.arange(grid.h).repeat_interleave(grid.w)
    columns = torch.arange(grid.w).repeat(grid.h)
    return torch.stack([rows, columns], dim=1).repeat(grid.t, 1)
