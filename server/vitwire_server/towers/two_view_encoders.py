"""From two views of an image to rows: Step3-VL, DeepSeek-VL with SAM, DeepSeek-OCR-2."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.deepseek_vl_hybrid.modeling_deepseek_vl_hybrid import DeepseekVLSamVisionProj
from transformers.vision_utils import get_vision_position_ids

from vitwire_server.towers.family import Parts
from vitwire_server.towers.relative import gather_relative_positions
from vitwire_server.towers.layouts.tiles import View, module_heads
from vitwire_server.towers.layouts.two_views import CropEncoder, PairEncoder


class Lone(nn.Module):
    """One parameter that belongs to no module of the tower."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


class Alpha(Lone):
    """Weight of the inner layer in DeepSeek-VL's high resolution."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - configurations are of many classes
        del config
        super().__init__(1)


class Separator(Lone):
    """The row behind every image of DeepSeek-OCR-2."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        super().__init__(config.text_config.hidden_size)


class Merger(DeepseekVLSamVisionProj):
    """SAM's rows brought to SigLIP's grid, whose side is in the configuration of the whole."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        vision = config.vision_config
        super().__init__(config.high_res_vision_config, output_size=vision.image_size // vision.patch_size)


class Projection(nn.Linear):
    """Step3-VL's projector, which transformers keeps as a bare layer of the whole model."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        super().__init__(config.vision_config.hidden_size * 4, config.text_config.hidden_size, config.projector_bias)


class QueryProjection(nn.Linear):
    """DeepSeek-OCR-2's projector, which transformers keeps as a bare layer of the whole model."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        super().__init__(config.vision_config.encoder_config.hidden_size, config.text_config.hidden_size)


class Constants(nn.Module):
    """Buffers that follow from the size of a view, in the types that they were computed in."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)


class Step3(CropEncoder):
    """A ViT with rotary positions and two strided convolutions; positions of both sizes are constants."""

    def __init__(self, parts: Parts, config: Any) -> None:  # noqa: ANN401
        vision = config.vision_config
        self.patch, self.merge = vision.patch_size, 4
        self.view = self._view(vision.image_size)
        self.crop = self._view(config.crop_size)
        self.width = config.text_config.hidden_size
        self.heads = module_heads(vision)
        self._tower: Any = parts["tower"]
        self._projector = parts["projector"]
        self.blocks = list(self._tower.layers)
        sides = {view.height // self.patch for view in (self.view, self.crop)}
        self._constants = nn.ModuleDict({str(side): self._fixed(side) for side in sides})
        self._tower.constants = self._constants  # so that they move with it

    def _view(self, size: int) -> View:
        side = size // self.patch
        for _ in range(2):
            side = (side - 1) // 2 + 1
        return View(size, size, side * side)

    @torch.no_grad()
    def _fixed(self, side: int) -> Constants:
        """Positions of a grid of so many patches a side, learned and rotary."""
        weight = self._tower.embeddings.position_embedding.weight
        ids = get_vision_position_ids(torch.tensor([[1, side, side]]), 1)
        cosines, sines = self._tower.rotary_emb(weight, ids.to(weight.device))
        return Constants(learned=resampled(weight.float(), side).clone(), cosines=cosines, sines=sines)

    def encode(self, tiles: Tensor) -> Tensor:
        tower, side = self._tower, tiles.shape[-1] // self.patch
        constants: Any = self._constants[str(side)]
        patches = tower.embeddings.patch_embedding(tiles).flatten(2).transpose(1, 2)
        states = tower.pre_layernorm(patches + constants.learned.to(patches.dtype))
        for layer in tower.layers:
            states = layer(states, position_embeddings=(constants.cosines, constants.sines))
        grid = states.transpose(1, 2).unflatten(2, (side, side))
        merged: Tensor = tower.downsampler2(tower.downsampler1(grid))
        return self._projector(merged.flatten(2).transpose(1, 2))  # type: ignore[no-any-return]

    def encode_crops(self, crops: Tensor) -> Tensor:
        return self.encode(crops)


def resampled(table: Tensor, side: int) -> Tensor:
    """Learned positions `(own * own, C)` of a square grid for one of `side * side`: `(1, side * side, C)`."""
    own = round(len(table) ** 0.5)
    grid = table.T.reshape(1, -1, own, own)
    if own != side:
        grid = functional.interpolate(grid, size=(side, side), mode="bilinear", align_corners=False)
    return grid.flatten(2).transpose(1, 2)


class DeepseekHybrid(PairEncoder):
    """SigLIP on the small tile, SAM on the large one, projected together."""

    def __init__(self, parts: Parts, config: Any) -> None:  # noqa: ANN401
        vision, sam = config.vision_config, config.high_res_vision_config
        self.patch, self.merge = vision.patch_size, 1
        self.view = View(vision.image_size, vision.image_size, (vision.image_size // vision.patch_size) ** 2)
        self.crop = (sam.image_size, sam.image_size)
        self.width = config.text_config.hidden_size
        self.heads = module_heads(vision)
        self._tower: Any = parts["tower"]
        self._sam: Any = parts["sam"]
        self._neck, self._merger, self._alpha = (parts[name] for name in ("neck", "merger", "alpha"))
        self._projector = parts["projector"]
        self._inner = sam.global_attn_indexes[0]
        encoder = self._sam.vision_encoder
        if sam.use_rel_pos:
            gather_relative_positions(encoder, (sam.image_size // sam.patch_size,))
        self.blocks = [*self._tower.encoder.layers, *encoder.layers]

    def encode_pairs(self, tiles: Tensor, crops: Tensor) -> Tensor:
        low = self._tower(pixel_values=tiles).last_hidden_state
        return self._projector(low, self._high(crops))  # type: ignore[no-any-return]

    def _high(self, crops: Tensor) -> Tensor:
        """SAM's last layer and an inner one, `(tiles, tokens, C)`."""
        encoder = self._sam.vision_encoder
        states = encoder.patch_embed(crops)
        if encoder.pos_embed is not None:
            states = states + encoder.pos_embed
        inner = states
        for index, layer in enumerate(encoder.layers):
            states = layer(states)
            if index == self._inner:
                inner = states
        last = self._merger(encoder.neck(states))
        merged: Tensor = last + self._merger(self._neck(inner)) * self._alpha.weight
        return merged.flatten(2).transpose(1, 2)


class DeepseekOcr2(CropEncoder):
    """SAM, then a language model's layers in which learned queries read the patches: their rows count."""

    def __init__(self, parts: Parts, config: Any) -> None:  # noqa: ANN401
        vision = config.vision_config
        sam = vision.sam_config
        self.patch, self.merge = sam.patch_size, 4
        self._tower: Any = parts["tower"]
        self._projector = parts["projector"]
        self._separator = parts["separator"]
        self._queries = {
            sam.image_size: self._tower.query_1024_resolution,
            config.crop_size: self._tower.query_768_resolution,
        }
        counts = {size: len(queries.weight) for size, queries in self._queries.items()}
        for size, count in counts.items():
            if count != (size // self.patch // self.merge) ** 2:
                raise ValueError(f"a view of {size} pixels does not become {count} tokens")
        self.view = View(sam.image_size, sam.image_size, counts[sam.image_size] + 1)
        self.crop = View(config.crop_size, config.crop_size, counts[config.crop_size])
        self.width = config.text_config.hidden_size
        self.heads = module_heads(vision.encoder_config)
        if sam.use_rel_pos:
            gather_relative_positions(self._tower.sam_encoder, tuple(size // self.patch for size in self._queries))
        self._constants = nn.ModuleDict({str(size): self._fixed(count) for size, count in counts.items()})
        self._tower.constants = self._constants  # so that they move with it
        self.blocks = [*self._tower.sam_encoder.layers, *self._tower.vision_encoder.layers]

    @torch.no_grad()
    def _fixed(self, count: int) -> Constants:
        """Mask and rotary positions of so many patches and as many queries: a query sees those before it."""
        weight, length = self._tower.query_1024_resolution.weight, 2 * count
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        seen[:count, :count] = True
        positions = torch.arange(length, device=weight.device).unsqueeze(0)
        cosines, sines = self._tower.vision_encoder.rotary_emb(weight.float(), positions)
        return Constants(seen=seen[None, None].to(weight.device), cosines=cosines, sines=sines)

    def encode(self, tiles: Tensor) -> Tensor:
        rows = self._rows(tiles)
        return torch.cat([rows, self._separator.weight.expand(len(rows), 1, -1)], dim=1)

    def encode_crops(self, crops: Tensor) -> Tensor:
        return self._rows(crops)

    def _rows(self, views: Tensor) -> Tensor:
        size = views.shape[-1]
        queries, constants = self._queries[size].weight, self._constants[str(size)]
        encoder: Any = self._tower.vision_encoder
        patches = self._tower.sam_encoder(views).last_hidden_state.flatten(2).transpose(1, 2)
        states = torch.cat([patches, queries.expand(len(views), -1, -1)], dim=1)
        turns = (constants.cosines.to(states.dtype), constants.sines.to(states.dtype))
        for layer in encoder.layers:
            states = layer(states, attention_mask=constants.seen, position_embeddings=turns)
        return self._projector(encoder.norm(states[:, patches.shape[1] :]))  # type: ignore[no-any-return]
